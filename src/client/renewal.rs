//! What is known of a lease that is held, and the task that keeps it.

use std::{sync::Arc, time::Duration};

use backon::{BackoffBuilder, ExponentialBuilder};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout_at},
};

use super::loss::Loss;
use crate::{
    header::FencingToken,
    lease::{Lease, LeaseError, LeaseId, Leases, Renew},
    token::{Resource, Token},
};

/// What the guard, its task, and the layers that add its token share.
pub(super) struct Known {
    pub(super) resource: Resource,
    header: HeaderName,
    state: watch::Sender<State>,
}

struct State {
    token: Token,
    /// When the lease ends, for all that is known here.
    until: Instant,
    /// Why the last renewal did not get through.
    failure: Option<LeaseError>,
    lost: Option<Loss>,
}

impl Known {
    pub(super) fn new(lease: &Lease, asked_at: Instant, header: HeaderName) -> Self {
        Self {
            resource: lease.resource.clone(),
            header,
            state: watch::Sender::new(State {
                token: lease.token,
                until: end(lease, asked_at),
                failure: None,
                lost: None,
            }),
        }
    }

    pub(super) fn token(&self) -> Token {
        self.state.borrow().token
    }

    pub(super) fn until(&self) -> Instant {
        self.state.borrow().until
    }

    pub(super) fn fencing_token(&self) -> FencingToken {
        FencingToken::new(self.token()).with_resource(self.resource.clone())
    }

    /// Adds the token to the headers of a request, in place of any other.
    pub(super) fn add_to(&self, headers: &mut HeaderMap) {
        // The List grammar is ASCII; a Display String escapes the rest.
        if let Ok(value) = HeaderValue::try_from(self.fencing_token().to_string()) {
            headers.insert(self.header.clone(), value);
        }
    }

    /// How the lease was lost, if it was. A lease whose time is up is lost, even before its task
    /// has said so.
    pub(super) fn lost(&self) -> Option<Loss> {
        let state = self.state.borrow();
        let expired = || {
            (Instant::now() >= state.until).then(|| Loss::Expired {
                resource: self.resource.clone(),
                cause: state.failure.clone(),
            })
        };
        state.lost.clone().or_else(expired)
    }

    /// Notes a loss, unless there was one before; returns the one that counts.
    pub(super) fn lose(&self, loss: Loss) -> Loss {
        self.state.send_if_modified(|state| {
            let first = state.lost.is_none();
            state.lost.get_or_insert(loss);
            first
        });
        let state = self.state.borrow();
        let given_up = || Loss::GivenUp {
            resource: self.resource.clone(),
        };
        state.lost.clone().unwrap_or_else(given_up)
    }

    /// Notes what the store has answered to a request that was sent at this time.
    pub(super) fn renewed(&self, lease: &Lease, asked_at: Instant) {
        self.state.send_modify(|state| {
            // Answers may overtake each other.
            state.token = state.token.max(lease.token);
            state.until = state.until.max(end(lease, asked_at));
            state.failure = None;
        });
    }

    fn failed(&self, error: LeaseError) {
        self.state.send_modify(|state| state.failure = Some(error));
    }

    /// Waits for the loss.
    pub(super) async fn wait_for_loss(self: Arc<Self>) -> Loss {
        let mut watched = self.state.subscribe();
        loop {
            let until = {
                let state = watched.borrow_and_update();
                if let Some(loss) = &state.lost {
                    return loss.clone();
                }
                state.until
            };
            tokio::select! {
                changed = watched.changed() => if changed.is_err() { break },
                () = sleep_until(until) => if let Some(loss) = self.lost() { return loss },
            }
        }
        Loss::GivenUp {
            resource: self.resource.clone(),
        }
    }
}

/// When a lease ends that was asked for at this time.
fn end(lease: &Lease, asked_at: Instant) -> Instant {
    asked_at.checked_add(lease.ttl).unwrap_or(asked_at)
}

/// Renews at a third of the time, until the lease is lost.
pub(super) async fn renew<L: Leases>(
    leases: Arc<L>,
    known: Arc<Known>,
    id: LeaseId,
    ttl: Duration,
    asked_at: Instant,
) {
    let mut renew_at = asked_at + ttl / 3;
    let mut pauses = pauses(ttl / 20, ttl / 6);
    loop {
        sleep_until(renew_at.min(known.until())).await;
        if let Some(loss) = known.lost() {
            known.lose(loss);
            return;
        }
        let asked_at = Instant::now();
        // An answer that does not come must not use up the time for asking again.
        let answer_by = known.until().min(asked_at + ttl / 3);
        let asking = leases.renew(&known.resource, &id, Renew::new(ttl));
        match timeout_at(answer_by, asking).await {
            Ok(Ok(lease)) => {
                known.renewed(&lease, asked_at);
                renew_at = asked_at + ttl / 3;
                pauses = self::pauses(ttl / 20, ttl / 6);
                continue;
            }
            Ok(Err(LeaseError::Lost { resource })) => {
                known.lose(Loss::Refused { resource });
                return;
            }
            Ok(Err(error)) => known.failed(error),
            Err(_) => {
                let elapsed = std::io::Error::from(std::io::ErrorKind::TimedOut);
                known.failed(LeaseError::unavailable(elapsed));
            }
        }
        renew_at = Instant::now() + pauses.next().unwrap_or(ttl / 6);
    }
}

/// How long to pause before asking again, each time: exponential, with full jitter.
pub(super) fn pauses(first: Duration, longest: Duration) -> impl Iterator<Item = Duration> + Send {
    let growing = ExponentialBuilder::new()
        .with_min_delay(first)
        .with_max_delay(longest)
        .without_max_times();
    growing.build().map(|pause| pause.mul_f64(rand::random()))
}
