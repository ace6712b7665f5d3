//! What is known of a lease that is held, and the task that keeps it.

use std::{sync::Arc, time::Duration};

use backon::{BackoffBuilder, ExponentialBuilder};
use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::loss::Loss;
use crate::{
    header::FencingToken,
    lease::{Lease, LeaseError, LeaseId, Leases, Renew},
    metrics,
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
    /// When the request was sent whose answer says so.
    asked_at: Instant,
    /// Why the last renewal did not get through.
    failure: Option<LeaseError>,
    lost: Option<Loss>,
}

impl Known {
    pub(super) fn new(lease: &Lease, asked_at: Instant, header: HeaderName) -> Self {
        metrics::held(1.0);
        Self {
            resource: lease.resource.clone(),
            header,
            state: watch::Sender::new(State {
                token: lease.token,
                until: end(lease, asked_at),
                asked_at,
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

    /// How the lease was lost, if it was. A lease whose time is up is lost, and stays so, even
    /// before its task has noticed.
    pub(super) fn lost(&self) -> Option<Loss> {
        {
            let state = self.state.borrow();
            if state.lost.is_some() || Instant::now() < state.until {
                return state.lost.clone();
            }
        }
        self.state.send_if_modified(|state| {
            let expired = state.lost.is_none() && Instant::now() >= state.until;
            if expired {
                let loss = Loss::Expired {
                    resource: self.resource.clone(),
                    cause: state.failure.take(),
                };
                loss.count();
                state.lost = Some(loss);
            }
            expired
        });
        self.state.borrow().lost.clone()
    }

    /// Notes a loss, unless there was one before; returns the one that counts.
    pub(super) fn lose(&self, loss: Loss) -> Loss {
        self.state.send_if_modified(|state| {
            let first = state.lost.is_none();
            state.lost.get_or_insert_with(|| {
                loss.count();
                loss
            });
            first
        });
        let state = self.state.borrow();
        let given_up = || Loss::GivenUp {
            resource: self.resource.clone(),
        };
        state.lost.clone().unwrap_or_else(given_up)
    }

    /// Notes what the store has answered to a request that was sent at this time. What was lost
    /// before stays lost.
    pub(super) fn renewed(&self, lease: &Lease, asked_at: Instant) {
        if self.lost().is_some() {
            return;
        }
        self.state.send_modify(|state| {
            state.token = state.token.max(lease.token);
            // Answers may overtake each other; the request that was sent last decides.
            if asked_at >= state.asked_at {
                state.asked_at = asked_at;
                state.until = end(lease, asked_at);
                state.failure = None;
            }
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
                // Its sender lives as long as `self`.
                _ = watched.changed() => {}
                () = sleep_until(until) => {
                    self.lost();
                }
            }
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
    wanted_ttl: Duration,
    granted: (Duration, Instant),
) {
    let (mut ttl, asked_at) = granted;
    let mut renew_at = asked_at + ttl / 3;
    let mut pauses = pauses(ttl / 20, ttl / 6);
    // Another request may go out while one is without an answer: a slow answer still counts, and one
    // that never comes must not use up the time.
    let mut asking = FuturesUnordered::new();
    loop {
        if known.lost().is_some() {
            return;
        }
        tokio::select! {
            biased;
            () = sleep_until(known.until()) => {}
            Some((asked_at, answer)) = asking.next() => match answer {
                Ok(lease) => {
                    let lease: Lease = lease;
                    known.renewed(&lease, asked_at);
                    ttl = lease.ttl;
                    renew_at = asked_at + ttl / 3;
                    pauses = self::pauses(ttl / 20, ttl / 6);
                    asking = FuturesUnordered::new();
                }
                Err(LeaseError::Lost { resource }) => {
                    known.lose(Loss::Refused { resource });
                }
                Err(error) => {
                    known.failed(error);
                    renew_at = Instant::now() + pauses.next().unwrap_or(ttl / 6);
                }
            },
            () = sleep_until(renew_at) => {
                let asked_at = Instant::now();
                let answer = leases.renew(&known.resource, &id, Renew::new(wanted_ttl));
                asking.push(answer.map(move |answer| (asked_at, answer)));
                renew_at = asked_at + ttl / 3;
                if asking.len() > 1 {
                    known.failed(LeaseError::unavailable(std::io::Error::from(
                        std::io::ErrorKind::TimedOut,
                    )));
                }
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_bound_with_full_jitter() {
        let (first, longest) = (Duration::from_millis(50), Duration::from_secs(2));
        let runs: Vec<Vec<Duration>> = (0..400)
            .map(|_| pauses(first, longest).take(9).collect())
            .collect();
        for step in 0..9 {
            let bound = (first * (1 << step)).min(longest);
            let of_step = || runs.iter().map(|run| run[step]);
            assert!(of_step().all(|pause| pause <= bound), "step {step}");
            // Spread over the whole range, from nothing to the bound.
            assert!(of_step().any(|pause| pause < bound / 10), "step {step}");
            assert!(of_step().any(|pause| pause > bound * 9 / 10), "step {step}");
        }
    }
}
