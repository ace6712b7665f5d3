//! The lease of `run`. All requests, from the acquisition to the release, use one lease id.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::{Instant, timeout};
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
    failure::{self, Failure, chain, chain_on, shown},
    logs,
};

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
        let mut asked_at = None;
        let ended = {
            let mut asking = std::pin::pin!(self.ask(holder, wait, &mut asked_at));
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
                if let Some(in_transit) = refused.may_be_granted {
                    let limit = self.release_timeout.min(self.ttl);
                    self.take_back(limit, in_transit, refused.other, signals)
                        .await;
                }
                Err(refused.failure)
            }
            Err(signal) => {
                if let Some(asked_at) = asked_at {
                    let limit = TAKE_BACK.min(self.release_timeout);
                    let in_transit = ON_ITS_WAY.saturating_sub(asked_at.elapsed());
                    self.take_back(limit, in_transit, None, signals).await;
                }
                Err(interrupted(signal))
            }
        }
    }

    /// Acquires the lease. Sets `asked_at` before each acquisition.
    async fn ask(
        &self,
        holder: &Holder<L>,
        wait: Duration,
        asked_at: &mut Option<Instant>,
    ) -> Result<LeaseGuard<L>, Refused> {
        // If the secret is rejected or the configuration is invalid, this request fails
        // immediately, whereas an acquisition could wait first.
        if let Err(error) = self.leases.inspect(&self.resource).await {
            let failure = client::failure(&error);
            if matches!(failure.status, failure::REFUSED | failure::CONFIGURATION) {
                return Err(Refused::new(failure));
            }
        }
        let mut acquire = async |wait| {
            *asked_at = Some(Instant::now());
            let holder = holder.clone().wait(wait);
            holder.acquire_as(&self.resource, self.id.clone()).await
        };
        let mut asked = acquire(wait).await;
        let is_lost = matches!(
            &asked,
            Err(AcquireError::Lease(error)) if may_be_executed(error) && other_resource(error).is_none()
        );
        if is_lost {
            // The answer is lost, and the lease may have been granted. A repeated request returns
            // the lease.
            asked = acquire(Duration::ZERO).await;
        }
        let error = match asked {
            Ok(lease) => return Ok(lease),
            Err(AcquireError::Lease(error)) => error,
            Err(error) => {
                return Err(Refused::new(Failure::other(chain_on(
                    &error,
                    &self.resource,
                ))));
            }
        };
        let may_be_left = match error {
            // The store may have granted the lease to an earlier attempt. It may also still grant
            // the lease, because it keeps the position in the queue for three seconds, in case this
            // process retries.
            LeaseError::Held { .. }
            | LeaseError::TooManyWaiters { .. }
            | LeaseError::Misconfigured(_) => !wait.is_zero(),
            // The grant could not be announced.
            LeaseError::Exhausted { .. } => true,
            _ => false,
        };
        Err(Refused {
            failure: client::failure(&error),
            may_be_granted: match is_lost || may_be_executed(&error) {
                true => Some(ON_ITS_WAY),
                false => may_be_left.then_some(Duration::ZERO),
            },
            other: other_resource(&error),
        })
    }

    /// Releases a lease that may have been granted to a request whose answer was lost. For the time
    /// `in_transit`, the request may be executed after a release that overtakes it.
    async fn take_back(
        &self,
        limit: Duration,
        in_transit: Duration,
        other: Option<Resource>,
        signals: &mut Signals,
    ) {
        let now = Instant::now();
        let schedule = Schedule {
            until: now + limit,
            not_held_until: now + in_transit,
        };
        for resource in [Some(&self.resource), other.as_ref()].into_iter().flatten() {
            let released = release(&self.leases, resource, &self.id, schedule, signals).await;
            match released {
                Released::Done => return,
                Released::NotHeld => {}
                Released::Failed(error) => {
                    let (resource, error) = (shown(resource.as_str()), chain(&error));
                    logs::report(format_args!(
                        "the lease on {resource} may have been granted and could not be released; \
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
            let (resource, error) = (shown(self.resource.as_str()), chain(error));
            logs::report(format_args!(
                "the lease on {resource} could not be released and will expire: {error}"
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
            "the lease on {} may expire before the end of --at-least: {failure}",
            shown(self.resource.as_str())
        ));
    }
}

/// A failed acquisition.
struct Refused {
    failure: Failure,
    /// If the lease may have been granted in spite of the failure, how long the request may still
    /// be in transit.
    may_be_granted: Option<Duration>,
    /// The resource for which the server granted a lease instead of the requested one.
    other: Option<Resource>,
}

impl Refused {
    const fn new(failure: Failure) -> Self {
        Self {
            failure,
            may_be_granted: None,
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
