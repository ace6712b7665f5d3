//! The lease that `run` wants, has, and gives back, under one lease id from the first request to the last.

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

/// The longest time that one request waits in the queue. Issuers have a limit, of 60 s by default.
const LONGEST_STEP: Duration = Duration::from_secs(50);
/// How long a request may be on its way to the store, behind a later one.
const ON_ITS_WAY: Duration = Duration::from_secs(1);
/// How long a process that was told to end tries to release what it may have been granted.
const TAKE_BACK: Duration = Duration::from_secs(5);
/// How long a holder that has lost its lease by time tries to release it.
const AFTER_LOSS: Duration = Duration::from_secs(2);

pub struct Claim<L> {
    pub leases: L,
    pub resource: Resource,
    pub id: LeaseId,
    pub ttl: Duration,
    pub release_timeout: Duration,
}

impl<L: Leases + Clone> Claim<L> {
    /// Takes the lease, within this time. Where that fails, or a signal comes first, no lease is left behind.
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
        // The request that was under way has been given up by now.
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
        // A caller that is refused need not wait.
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
                // A server with a shorter limit.
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
                    // A server that takes no waiters is asked now and then.
                    if longest.is_zero() {
                        sleep(left.min(Duration::from_secs(1))).await;
                    }
                }
                // The answer is lost, and the lease may be there.
                _ if is_unheard && other.is_none() && !asked_once_more => asked_once_more = true,
                error => {
                    return Err(Refused {
                        failure: client::failure(&error),
                        may_be_granted,
                        other,
                    });
                }
            }
        }
    }

    /// Releases what may have been granted to a request whose answer was not heard.
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
                    logs::say(format_args!(
                        "tower-fence: the lease on {resource} may have been granted and could not be released; \
                         it ends by its time: {error}"
                    ));
                }
            }
        }
    }

    /// Whether the lease with this token is held until now, asked of the store by a renewal; `None` without an answer.
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

    /// Releases the lease that was held; retried for as long as it lasts, but for `release_timeout` at most.
    pub async fn release(
        &self,
        lease: LeaseGuard<L>,
        left: Duration,
        signals: &mut Signals,
    ) -> Released {
        // The renewals end, so that none of them follows the release.
        lease.detach();
        let now = Instant::now();
        let schedule = Schedule {
            until: now + left.min(self.release_timeout),
            not_held_until: now,
        };
        let released = release(&self.leases, &self.resource, &self.id, schedule, signals).await;
        if let Released::Failed(error) = &released {
            let (resource, error) = (&self.resource, chain(error));
            logs::say(format_args!(
                "tower-fence: the lease on {resource} ends by its time, it could not be released: {error}"
            ));
        }
        released
    }

    /// Releases a lease that was lost by time here, while the store may hold it a little longer.
    pub async fn release_lost(&self) {
        _ = timeout(AFTER_LOSS, self.leases.release(&self.resource, &self.id)).await;
    }

    /// Leaves the lease to end by itself after this time.
    pub async fn leave(&self, lease: LeaseGuard<L>, rest: Duration) {
        lease.detach();
        let renewed = self
            .leases
            .renew(&self.resource, &self.id, Renew::new(rest));
        _ = timeout(TAKE_BACK, renewed).await;
    }
}

/// Why there is no lease.
struct Refused {
    failure: Failure,
    /// Whether the lease may have been granted all the same.
    may_be_granted: bool,
    /// The resource whose lease was granted in place of the one that was asked for.
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

/// A signal that ends this process before its command begins.
pub fn interrupted(signal: Signal) -> Failure {
    let number = signal.as_raw();
    let text = format!("signal {number} came before the lease was granted");
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
