//! [`LeaseGuard`]: a held lease, and its renewal.

use std::{fmt, pin::pin, sync::Arc, task::Poll, time::Duration};

use http::{HeaderMap, StatusCode};
use tokio::{
    task::AbortHandle,
    time::{Instant, sleep_until, timeout_at},
};

use super::{held_lease::HeldLease, layer::TokenLayer, loss::Loss, renewal};
use crate::{
    header::FencingToken,
    lease::{LeaseError, LeaseId, Leases, ReleaseGuard, Renew},
    stale::StaleToken,
    time::after,
    token::{Resource, Token},
};

/// Guard of a lease that this process holds, returned by
/// [`Holder::acquire`](super::Holder::acquire).
///
/// The guard renews the lease in the background until the lease is released or lost, or the guard
/// is dropped. No renewal outlives the guard. Dropping the guard releases the lease in the
/// background, as [`release`](Self::release) does, unless the lease is lost and has a [lock
/// delay](super::Holder::lock_delay). The release runs on the current Tokio runtime or, outside of
/// a runtime, on the runtime in which the lease was acquired. If the release fails, or its runtime
/// shuts down, the lease expires. The asynchronous methods panic outside of a Tokio runtime.
#[must_use = "dropped, the guard releases the lease"]
pub struct LeaseGuard<L: Leases> {
    pub(super) leases: Arc<L>,
    pub(super) id: LeaseId,
    /// The TTL that a renewal requests.
    pub(super) ttl: Duration,
    pub(super) held: Arc<HeldLease>,
    pub(super) renewal: AbortHandle,
    pub(super) release: Option<ReleaseGuard<L>>,
    /// Whether the guard keeps the lease if it is dropped after a loss.
    pub(super) has_lock_delay: bool,
}

impl<L: Leases> LeaseGuard<L> {
    /// Returns the resource.
    #[must_use]
    pub fn resource(&self) -> &Resource {
        &self.held.resource
    }

    /// Returns the lease id, which is the secret for renewing and releasing the lease, for example
    /// in another process.
    #[must_use]
    pub const fn lease_id(&self) -> &LeaseId {
        &self.id
    }

    /// Returns the newest token that the guard has received.
    #[must_use]
    pub fn token(&self) -> Token {
        self.held.token()
    }

    /// Returns the value of the `Fencing-Token` header for a write.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.held.fencing_token()
    }

    /// Returns the headers that a write must carry, with the newest token.
    ///
    /// Any client that uses the types of the `http` crate accepts the headers. With reqwest, call
    /// `request.headers(lease.headers())`. Call this method once per write, and send the same
    /// headers with each retry. A retry with a different token would be a different write. The
    /// client should [not follow redirects](crate::guide::holders#redirects).
    #[must_use]
    pub fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(1);
        self.held.add_to(&mut headers);
        headers
    }

    /// Returns a layer that adds the newest token to each request of a tower client.
    #[must_use]
    pub fn layer(&self) -> TokenLayer {
        TokenLayer::new(Arc::clone(&self.held))
    }

    /// Returns the time until the lease counts as lost unless it is renewed, or zero if it is lost.
    /// This is the remaining time of the lease according to the store's responses, or the time left
    /// of [`max_hold`](super::Holder::max_hold) or
    /// [`progress_timeout`](super::Holder::progress_timeout) if one of them ends earlier.
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

    /// Reports that the work is making progress. If the holder has a
    /// [`progress_timeout`](super::Holder::progress_timeout), the work must call this method again
    /// before each timeout elapses.
    pub fn progress(&self) {
        self.held.progress();
    }

    /// Checks whether the lease is still held. The check uses memory only and sends no request.
    ///
    /// # Errors
    ///
    /// Returns the [`Loss`] if the lease is lost.
    pub fn check(&self) -> Result<(), Loss> {
        self.held.lost().map_or(Ok(()), Err)
    }

    /// Waits until the lease is lost.
    ///
    /// The future does not borrow the guard, so another task can await it. If the guard is released
    /// or dropped, the future resolves to [`Loss::GivenUp`].
    pub fn lost(&self) -> impl Future<Output = Loss> + Send + use<L> {
        Arc::clone(&self.held).wait_for_loss()
    }

    /// Runs `work`, and drops it as soon as the lease is lost.
    ///
    /// Requests that `work` has already sent may still arrive. If they carry the token, and the
    /// resource has received a newer token by then, the fence refuses them.
    ///
    /// # Errors
    ///
    /// Returns the [`Loss`] if the lease is lost before `work` completes.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, `work` is dropped, and the guard keeps the lease.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, Loss> {
        let (mut lost, mut work) = (pin!(self.lost()), pin!(work));
        std::future::poll_fn(|cx| {
            // A paused process resumes here, so check for a loss before polling the work.
            // `HeldLease::lost` also reads the clock, which may be ahead of the timer.
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

    /// Renews the lease with a new token, for another single-use write under the same lease.
    ///
    /// From then on, [`token`](Self::token) and [`headers`](Self::headers) return the new token to
    /// all users of the guard.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Lost`] if the lease is lost; [`check`](Self::check) returns the reason.
    /// - [`LeaseError::Unavailable`] or [`LeaseError::Misconfigured`] if no attempt succeeded
    ///   within the TTL. The issuer may already have granted a new token.
    /// - Any other error of the store, immediately, such as [`LeaseError::Exhausted`].
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the issuer may already have granted a new token. The next call
    /// requests another token. If the issuer executes an unanswered request only after a later
    /// renewal, the lease counts as lost.
    pub async fn renew_with_new_token(&self) -> Result<FencingToken, LeaseError> {
        let deadline = after(self.ttl);
        let mut pauses = renewal::pauses(self.ttl / 20, self.ttl / 6);
        let request = async {
            loop {
                let asked_at = Instant::now();
                let renew = Renew::new(self.ttl).with_new_token();
                let new_token = self.held.begin_token_request();
                let renewal = self.leases.renew(self.resource(), &self.id, renew);
                let renewed = timeout_at(deadline, renewal).await;
                match renewed.unwrap_or_else(|_| Err(renewal::late())) {
                    Ok(lease) => {
                        new_token.answered(&lease, asked_at);
                        return Ok(lease.fencing_token());
                    }
                    Err(error @ (LeaseError::Unavailable(_) | LeaseError::Misconfigured(_))) => {
                        drop(new_token);
                        if Instant::now() >= deadline {
                            return Err(error);
                        }
                        let pause = pauses.next().unwrap_or(self.ttl / 6);
                        sleep_until(deadline.min(Instant::now() + pause)).await;
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

    /// Checks whether the response to a write shows that the lease is lost.
    ///
    /// A 412 `stale-token` whose `max_token` is higher than this lease's token, or that refuses
    /// this lease's token without [`used`](StaleToken::used), means that another holder has the
    /// lease or a foreign token has superseded it. The lease is not lost if the fence refused the
    /// token because it had already been used, or refused it [`by_floor`](StaleToken::by_floor). In
    /// the latter case, renew [with a new token](Self::renew_with_new_token), and read the data
    /// again. After a request for a new token that has no response, `max_token` may be the
    /// requested token. Therefore, the lease does not count as lost until a later renewal has shown
    /// its token.
    ///
    /// Do not pass the refusal of an operation that treats a single-use token as reusable, such as
    /// `Fence::raise`. Such an operation refuses a used token without `used`.
    ///
    /// # Errors
    ///
    /// Returns the [`Loss`] that this response shows, or the loss that was recorded earlier.
    pub fn observe(&self, status: StatusCode, body: &[u8]) -> Result<(), Loss> {
        match StaleToken::from_response(status, body) {
            Some(stale)
                if stale.resource == *self.resource()
                    && !stale.by_floor
                    // Check this first. If no newer token may exist, `self.token()` in the next
                    // line is the newest one.
                    && !self.held.may_have_newer_token()
                    && (stale.max_token > self.token().get()
                        || (stale.presented_token == self.token() && !stale.used)) =>
            {
                self.renewal.abort();
                Err(self.held.lose(Loss::Superseded(stale)))
            }
            _ => self.check(),
        }
    }

    /// Releases the lease.
    ///
    /// If the store is unreachable, the guard retries until the lease has expired.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Lost`] if the lease was no longer held.
    /// - [`LeaseError::Unavailable`] if the store did not respond for the TTL of the lease.
    /// - Any other error of the store, such as [`LeaseError::Misconfigured`], without a retry. The
    ///   lease then expires.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has the same effect as dropping the guard.
    pub async fn release(mut self) -> Result<(), LeaseError> {
        let release = self.release.take();
        // From this point, the store may release the lease, so the lease must not be reported as
        // held.
        drop(self);
        match release {
            Some(release) => release.release().await,
            None => Ok(()),
        }
    }

    /// Stops the renewals without releasing the lease, and returns the lease id.
    ///
    /// Unless another program renews or releases the lease under this id, the lease expires.
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
        // Requests that the work of a lost lease has sent may still be in progress. The lock delay
        // covers them, and a release would end it.
        let keeps = self.has_lock_delay && self.held.lost().is_some();
        if let Some(release) = self.release.as_mut().filter(|_| keeps) {
            release.keep();
        }
        let resource = self.held.resource.clone();
        self.held.lose(Loss::GivenUp { resource });
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
