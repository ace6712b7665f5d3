//! The lease of `run`. All requests, from the acquisition to the release, use one lease id.

use std::{cell::Cell, time::Duration};

use rustix::process::Signal;
use tokio::time::{Instant, sleep, timeout};
use tower_fence::{
    Resource, Token,
    client::{AcquireError, Holder, HttpError, LeaseGuard},
    lease::{LeaseError, LeaseId, Leases, Renew},
};

use super::{
    process,
    release::{Released, Schedule, may_be_executed, release},
    signals::{self, Signals},
};
use crate::{
    client,
    failure::{self, Failure, chain},
    logs,
};

/// The maximum time that one request waits in the queue. It is shorter than the default maximum
/// wait of an issuer, 60 s.
const LONGEST_STEP: Duration = Duration::from_secs(50);
/// How long a request may still be in transit to the store after a later request has overtaken it.
const ON_ITS_WAY: Duration = Duration::from_secs(1);
/// How long this process tries, after a signal to end, to release a lease that may have been
/// granted to it.
const TAKE_BACK: Duration = Duration::from_secs(5);
/// How long this process tries to release a lease that has expired.
const AFTER_LOSS: Duration = Duration::from_secs(2);

pub struct Claim<L> {
    pub leases: L,
    pub resource: Resource,
    pub id: LeaseId,
    pub ttl: Duration,
    pub release_timeout: Duration,
}

impl<L: Leases + Clone> Claim<L> {
    /// Acquires the lease, and waits for at most `wait`. If this fails, or if a signal arrives
    /// first, releases the lease that may have been granted.
    pub async fn acquire(
        &self,
        holder: &Holder<L>,
        wait: Duration,
        signals: &mut Signals,
    ) -> Result<LeaseGuard<L>, Failure> {
        let asked_at = Cell::new(None);
        let ended = {
            let mut asking = std::pin::pin!(self.ask(holder, wait, &asked_at));
            loop {
                tokio::select! {
                    asked = &mut asking => break Ok(asked),
                    heard = signals.next() => match heard.signal {
                        Signal::CHILD => process::reap(|_, _| ()),
                        Signal::TSTP => signals::stop_this_process(),
                        signal => break Err(signal),
                    },
                }
            }
        };
        // The request in progress has been dropped by now.
        match ended {
            Ok(Ok(lease)) => Ok(lease),
            Ok(Err(refused)) => {
                if refused.may_be_granted {
                    let limit = self.release_timeout.min(self.ttl);
                    self.take_back(limit, &asked_at, &refused.other, signals)
                        .await;
                }
                Err(refused.failure)
            }
            Err(signal) => {
                if asked_at.get().is_some() {
                    let limit = TAKE_BACK.min(self.release_timeout);
                    self.take_back(limit, &asked_at, &None, signals).await;
                }
                Err(interrupted(signal))
            }
        }
    }

    async fn ask(
        &self,
        holder: &Holder<L>,
        wait: Duration,
        asked_at: &Cell<Option<Instant>>,
    ) -> Result<LeaseGuard<L>, Refused> {
        // If the secret is rejected or the configuration is invalid, this request fails
        // immediately, whereas an acquisition could wait first.
        if let Err(error) = self.leases.inspect(&self.resource).await {
            let failure = client::failure(&error);
            if matches!(failure.status, failure::REFUSED | failure::CONFIGURATION) {
                return Err(Refused::new(failure));
            }
        }
        let began = Instant::now();
        let mut longest = LONGEST_STEP;
        let mut may_be_granted = false;
        let mut asked_once_more = false;
        loop {
            let left = wait.saturating_sub(began.elapsed());
            let step = holder.clone().wait(left.min(longest));
            asked_at.set(Some(Instant::now()));
            let error = match step.acquire_as(&self.resource, self.id.clone()).await {
                Ok(lease) => return Ok(lease),
                Err(AcquireError::Lease(error)) => error,
                Err(error) => return Err(Refused::new(Failure::other(chain(&error)))),
            };
            let is_unheard = may_be_executed(&error);
            may_be_granted |= is_unheard;
            let left = wait.saturating_sub(began.elapsed());
            let other = other_resource(&error);
            match error {
                // The server's maximum wait is shorter, so the next request asks for less.
                LeaseError::Invalid { ref field, .. }
                    if field == "wait_ms" && !longest.is_zero() =>
                {
                    longest = if longest > Duration::from_secs(1) {
                        longest / 2
                    } else {
                        Duration::ZERO
                    };
                }
                LeaseError::Held { .. }
                | LeaseError::TooManyWaiters { .. }
                | LeaseError::Unavailable(_)
                    if !left.is_zero() && other.is_none() =>
                {
                    // The server accepts no waiters, so it is polled.
                    if longest.is_zero() {
                        sleep(left.min(Duration::from_secs(1))).await;
                    }
                }
                // The answer is lost, and the lease may have been granted. A repeated request
                // returns it.
                _ if is_unheard && other.is_none() && !asked_once_more => asked_once_more = true,
                error => {
                    let is_queued = !wait.is_zero()
                        && matches!(
                            error,
                            LeaseError::Held { .. } | LeaseError::TooManyWaiters { .. }
                        );
                    if is_queued && !may_be_granted {
                        // No request is in transit.
                        asked_at.set(None);
                    }
                    return Err(Refused {
                        failure: client::failure(&error),
                        // The store keeps the position in the queue for a moment, in case this
                        // process retries, and may grant the lease. A release ends both.
                        may_be_granted: may_be_granted || is_queued,
                        other,
                    });
                }
            }
        }
    }

    /// Releases a lease that may have been granted to a request whose answer was lost.
    async fn take_back(
        &self,
        limit: Duration,
        asked_at: &Cell<Option<Instant>>,
        other: &Option<Resource>,
        signals: &mut Signals,
    ) {
        let now = Instant::now();
        let schedule = Schedule {
            until: now + limit,
            // The request may be executed after a release that overtakes it.
            not_held_until: asked_at.get().map_or(now, |asked_at| asked_at + ON_ITS_WAY),
        };
        for resource in [Some(&self.resource), other.as_ref()].into_iter().flatten() {
            let released = release(&self.leases, resource, &self.id, schedule, signals).await;
            match released {
                Released::Done => return,
                Released::NotHeld => {}
                Released::Failed(error) => {
                    let error = chain(&error);
                    logs::report(format_args!(
                        "tower-fence: the lease on {resource} may have been granted and could not be released; \
                         it will expire: {error}"
                    ));
                }
            }
        }
    }

    /// Renews the lease. Returns whether the lease with this token was still held, or `None` if
    /// there is no answer.
    pub async fn is_held(&self, token: Token) -> Option<bool> {
        let renewed = self
            .leases
            .renew(&self.resource, &self.id, Renew::new(self.ttl));
        match renewed.await {
            Ok(lease) => Some(lease.token == token),
            Err(LeaseError::Lost { .. }) => Some(false),
            Err(_) => None,
        }
    }

    /// Releases the lease. A failed release is retried until the lease expires, at most for
    /// `release_timeout`.
    pub async fn release(
        &self,
        lease: LeaseGuard<L>,
        left: Duration,
        signals: &mut Signals,
    ) -> Released {
        // Stop the renewals, so that none of them follows the release.
        lease.detach();
        let now = Instant::now();
        let schedule = Schedule {
            until: now + left.min(self.release_timeout),
            not_held_until: now,
        };
        let released = release(&self.leases, &self.resource, &self.id, schedule, signals).await;
        if let Released::Failed(error) = &released {
            let (resource, error) = (&self.resource, chain(error));
            logs::report(format_args!(
                "tower-fence: the lease on {resource} could not be released and will expire: {error}"
            ));
        }
        released
    }

    /// Releases a lease that has expired by the clock of this process, because it may last a little
    /// longer in the store.
    pub async fn release_lost(&self) {
        _ = timeout(AFTER_LOSS, self.leases.release(&self.resource, &self.id)).await;
    }

    /// Stops the renewals, and then renews the lease once so that it expires after `rest`.
    pub async fn leave(&self, lease: LeaseGuard<L>, rest: Duration) {
        lease.detach();
        let renewed = self
            .leases
            .renew(&self.resource, &self.id, Renew::new(rest));
        let failure = match timeout(TAKE_BACK, renewed).await {
            Ok(Ok(_)) => return,
            Ok(Err(error)) => chain(&error),
            Err(_) => "the server did not answer in time".into(),
        };
        logs::report(format_args!(
            "tower-fence: the lease on {} may expire before the end of --at-least: {failure}",
            self.resource
        ));
    }
}

/// A failed acquisition.
struct Refused {
    failure: Failure,
    /// Whether the lease may have been granted in spite of the failure.
    may_be_granted: bool,
    /// The resource for which the server granted a lease instead of the requested one.
    other: Option<Resource>,
}

impl Refused {
    const fn new(failure: Failure) -> Self {
        Self {
            failure,
            may_be_granted: false,
            other: None,
        }
    }
}

/// The failure for a signal that ends this process before its command starts.
pub fn interrupted(signal: Signal) -> Failure {
    let number = signal.as_raw();
    let text = format!("signal {number} arrived before the lease was granted");
    Failure::new(128 + number as u8, text)
}

fn other_resource(error: &LeaseError) -> Option<Resource> {
    match error {
        LeaseError::Unavailable(cause) => match cause.downcast_ref() {
            Some(HttpError::OtherResource { answered }) => Some(answered.clone()),
            _ => None,
        },
        _ => None,
    }
}
