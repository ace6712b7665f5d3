//! A lease that is kept as long as its guard lives.

use std::{fmt, pin::pin, sync::Arc, task::Poll, time::Duration};

use http::{HeaderMap, HeaderName, StatusCode};
use tokio::{
    task::AbortHandle,
    time::{Instant, sleep_until},
};

use super::{
    held_lease::{Bounds, HeldLease},
    layer::TokenLayer,
    loss::Loss,
    renewal,
};
use crate::{
    header::FencingToken,
    lease::{Lease, LeaseError, LeaseId, Leases, ReleaseGuard, Renew, time::after},
    stale::StaleToken,
    token::{Resource, Token},
};

/// A lease that is held, from [`Holder::acquire`](super::Holder::acquire).
///
/// It is renewed in the background until it is released, dropped, or lost. No renewal outlives the
/// guard. Dropped, it releases the lease in the background, as [`release`](Self::release) does. If that does
/// not succeed, the lease ends by its time.
#[must_use = "dropped, the guard releases the lease"]
pub struct LeaseGuard<L: Leases> {
    leases: Arc<L>,
    id: LeaseId,
    ttl: Duration,
    held: Arc<HeldLease>,
    renewal: AbortHandle,
    release: Option<ReleaseGuard<L>>,
}

impl<L: Leases> LeaseGuard<L> {
    /// Begins to renew, for `ttl` each time. `asked_at` is from before the request was sent.
    pub(super) fn new(
        leases: Arc<L>,
        lease: Lease,
        asked_at: Instant,
        ttl: Duration,
        header: HeaderName,
        bounds: Bounds,
        release: ReleaseGuard<L>,
    ) -> Self {
        let held = Arc::new(HeldLease::new(&lease, asked_at, header, bounds));
        let id = lease.id;
        let task = (Arc::clone(&leases), Arc::clone(&held), id.clone());
        let renewals = renewal::renew(task.0, task.1, task.2, ttl, (lease.ttl, asked_at));
        Self {
            renewal: tokio::spawn(renewals).abort_handle(),
            release: Some(release),
            leases,
            id,
            ttl,
            held,
        }
    }

    /// The resource.
    #[must_use]
    pub fn resource(&self) -> &Resource {
        &self.held.resource
    }

    /// The lease id: the secret that renews and releases the lease, for a program that shall do so elsewhere.
    #[must_use]
    pub const fn lease_id(&self) -> &LeaseId {
        &self.id
    }

    /// The token, the newest one that was taken.
    #[must_use]
    pub fn token(&self) -> Token {
        self.held.token()
    }

    /// The value of the `Fencing-Token` header for a write.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.held.fencing_token()
    }

    /// The headers that a write must carry, with the newest token, for any client that takes `http`'s:
    /// with reqwest, `request.headers(lease.headers())`. Take them once per write: repeated with
    /// another token, it would be another write.
    #[must_use]
    pub fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(1);
        self.held.add_to(&mut headers);
        headers
    }

    /// A layer for a tower client, which adds the token to each request that passes.
    #[must_use]
    pub fn layer(&self) -> TokenLayer {
        TokenLayer::new(Arc::clone(&self.held))
    }

    /// How long the lease still lasts by the answers so far; nothing once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        match self.held.lost() {
            Some(_) => Duration::ZERO,
            None => self
                .held
                .ends_at()
                .saturating_duration_since(Instant::now()),
        }
    }

    /// Reports that the work makes progress, for a holder with a
    /// [`progress_timeout`](super::Holder::progress_timeout).
    pub fn progress(&self) {
        self.held.progress();
    }

    /// Asks whether the lease is held, without asking the store.
    ///
    /// # Errors
    ///
    /// The [`Loss`].
    pub fn check(&self) -> Result<(), Loss> {
        self.held.lost().map_or(Ok(()), Err)
    }

    /// Waits for the loss. The future holds nothing of the guard, and may be moved elsewhere; it
    /// ends with [`Loss::GivenUp`] when the guard is released or dropped.
    pub fn lost(&self) -> impl Future<Output = Loss> + Send + use<L> {
        Arc::clone(&self.held).wait_for_loss()
    }

    /// Drives `work`, and drops it at the moment of loss.
    ///
    /// What it had sent by then may still arrive; the fence refuses it, if it comes with the token
    /// and another holder has the lease.
    ///
    /// # Errors
    ///
    /// The [`Loss`].
    ///
    /// # Cancel safety
    ///
    /// Dropped, it drops the work. The lease stays with the guard.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, Loss> {
        let (mut lost, mut work) = (pin!(self.lost()), pin!(work));
        std::future::poll_fn(|cx| {
            // First, since a process that was paused wakes up here. Asking also looks at the
            // clock, which may be ahead of the timer.
            if let Poll::Ready(loss) = lost.as_mut().poll(cx) {
                return Poll::Ready(Err(loss));
            }
            if let Some(loss) = self.held.lost() {
                return Poll::Ready(Err(loss));
            }
            work.as_mut().poll(cx).map(Ok)
        })
        .await
    }

    /// Renews the lease with a new token, for another single-use write under it. From now on
    /// [`token`](Self::token) and [`headers`](Self::headers) have it, for all who share the guard.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Lost`] when the lease is lost; [`check`](Self::check) tells how.
    /// - [`LeaseError::Unavailable`] when the store did not answer within the time of a lease,
    ///   asked again and again.
    ///
    /// # Cancel safety
    ///
    /// Dropped, a new token may have been taken; the next call takes another.
    pub async fn renew_with_new_token(&self) -> Result<FencingToken, LeaseError> {
        let deadline = after(self.ttl);
        let mut pauses = renewal::pauses(self.ttl / 20, self.ttl / 6);
        let request = async {
            loop {
                let asked_at = Instant::now();
                let renew = Renew::new(self.ttl).with_new_token();
                let new_token = self.held.asks_for_new_token();
                let renewed = self.leases.renew(self.resource(), &self.id, renew).await;
                let again_at = Instant::now() + pauses.next().unwrap_or(self.ttl / 6);
                match renewed {
                    Ok(lease) => {
                        new_token.answered(&lease, asked_at);
                        return Ok(lease.fencing_token());
                    }
                    Err(error @ (LeaseError::Unavailable(_) | LeaseError::Misconfigured(_))) => {
                        drop(new_token);
                        if again_at >= deadline {
                            return Err(error);
                        }
                        sleep_until(again_at).await;
                    }
                    Err(error) => {
                        new_token.refused();
                        return Err(error);
                    }
                }
            }
        };
        let resource = self.resource().clone();
        match self.run(request).await {
            Ok(Ok(token)) => Ok(token),
            Ok(Err(LeaseError::Lost { resource })) => {
                let lost = resource.clone();
                self.held.lose(Loss::Refused { resource: lost });
                Err(LeaseError::Lost { resource })
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(LeaseError::Lost { resource }),
        }
    }

    /// Looks at the answer to a write: 412 `stale-token` with a newer token than this lease's means
    /// that another holder has the lease. A token of this lease that was used up does not, nor one that is
    /// refused [`by_floor`](StaleToken::by_floor): renew that [with a new
    /// token](Self::renew_with_new_token), and read again.
    ///
    /// # Errors
    ///
    /// The [`Loss`], this one or an earlier one.
    pub fn observe(&self, status: StatusCode, body: &[u8]) -> Result<(), Loss> {
        match StaleToken::from_response(status, body) {
            Some(stale)
                if stale.resource == *self.resource()
                    && stale.max_token > self.token().get()
                    && !stale.by_floor =>
            {
                self.renewal.abort();
                Err(self.held.lose(Loss::Outranked(stale)))
            }
            _ => self.check(),
        }
    }

    /// Releases the lease, and reports whether it was still held. A store that cannot be reached is retried
    /// until the lease must have expired.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Lost`] if it was not held any more.
    /// - [`LeaseError::Unavailable`] if the store did not answer until then; the lease ends by its time.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it is as if the guard was dropped.
    pub async fn release(mut self) -> Result<(), LeaseError> {
        self.renewal.abort();
        // From here on another holder may have it.
        let resource = self.held.resource.clone();
        self.held.lose(Loss::GivenUp { resource });
        match self.release.take() {
            Some(mut release) => {
                release.until(self.held.until());
                release.release().await
            }
            None => Ok(()),
        }
    }

    /// Ends the renewals and keeps the lease, for a program that renews or releases it by its lease id from now on.
    /// Otherwise it ends by its time.
    pub fn detach(mut self) -> LeaseId {
        if let Some(release) = &mut self.release {
            release.keep();
        }
        self.id.clone()
    }
}

impl<L: Leases> Drop for LeaseGuard<L> {
    fn drop(&mut self) {
        self.renewal.abort();
        let resource = self.held.resource.clone();
        self.held.lose(Loss::GivenUp { resource });
        if let Some(release) = &mut self.release {
            release.until(self.held.until());
        }
    }
}

impl<L: Leases> fmt::Debug for LeaseGuard<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseGuard")
            .field("resource", self.resource())
            .field("token", &self.token())
            .field("lost", &self.held.lost())
            .finish_non_exhaustive()
    }
}
