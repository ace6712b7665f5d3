//! What a process knows of a lease that it holds.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::loss::Loss;
use crate::{
    header::FencingToken,
    lease::{Lease, LeaseError},
    metrics,
    token::{Resource, Token},
};

/// A lease as its holder sees it. Shared by the guard, the task that renews, and the layers that add
/// the token.
pub(super) struct HeldLease {
    pub(super) resource: Resource,
    header: HeaderName,
    state: watch::Sender<State>,
}

struct State {
    /// The newest one, as the issuer has written it.
    token: FencingToken,
    /// When the lease ends, by the answers so far.
    until: Instant,
    /// When the request was sent whose answer says so.
    asked_at: Instant,
    /// How many requests for a new token have no answer: each of them may have taken one.
    unanswered: usize,
    /// Why the last renewal did not get through.
    failure: Option<LeaseError>,
    lost: Option<Loss>,
}

impl HeldLease {
    pub(super) fn new(lease: &Lease, asked_at: Instant, header: HeaderName) -> Self {
        metrics::held(1.0);
        Self {
            resource: lease.resource.clone(),
            header,
            state: watch::Sender::new(State {
                token: lease.fencing_token(),
                until: end(lease, asked_at),
                asked_at,
                unanswered: 0,
                failure: None,
                lost: None,
            }),
        }
    }

    pub(super) fn token(&self) -> Token {
        self.state.borrow().token.token
    }

    pub(super) fn until(&self) -> Instant {
        self.state.borrow().until
    }

    pub(super) fn fencing_token(&self) -> FencingToken {
        self.state.borrow().token.clone()
    }

    /// Adds the token to the headers of a request, in place of any other.
    pub(super) fn add_to(&self, headers: &mut HeaderMap) {
        // The List grammar is ASCII; a Display String escapes the rest.
        if let Ok(mut value) = HeaderValue::try_from(self.fencing_token().to_string()) {
            value.set_sensitive(true);
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

    /// Notes that a new token is asked for.
    pub(super) fn asks_for_new_token(&self) {
        self.state.send_modify(|state| state.unanswered += 1);
    }

    /// Notes the answer to a request for a new token that was sent at this time.
    pub(super) fn renewed_with_new_token(&self, lease: &Lease, asked_at: Instant) {
        self.state.send_modify(|state| state.unanswered -= 1);
        self.note(lease, asked_at);
    }

    /// Notes the answer to a renewal that was sent at this time and keeps the token. Another token tells
    /// that the lease was over meanwhile, and was granted anew under its id, to a repeated request that
    /// came late: what was read under the old one may be written over by now.
    pub(super) fn renewed(&self, lease: &Lease, asked_at: Instant) {
        let is_another = {
            let state = self.state.borrow();
            lease.token > state.token.token && state.unanswered == 0
        };
        if is_another {
            let resource = self.resource.clone();
            self.lose(Loss::Refused { resource });
        }
        self.note(lease, asked_at);
    }

    /// Notes what the store has answered. What was lost before stays lost.
    fn note(&self, lease: &Lease, asked_at: Instant) {
        if self.lost().is_some() {
            return;
        }
        self.state.send_modify(|state| {
            // Answers may overtake each other; the request that was sent last decides.
            let is_last = asked_at >= state.asked_at;
            // The same token may come back under another key.
            if lease.token > state.token.token || (is_last && lease.token == state.token.token) {
                state.token = lease.fencing_token();
            }
            if is_last {
                state.asked_at = asked_at;
                state.until = end(lease, asked_at);
                state.failure = None;
            }
        });
    }

    /// Notes why a renewal did not get through.
    pub(super) fn failed(&self, error: LeaseError) {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{header::FENCING_TOKEN, lease::LeaseId};

    fn lease(token: i64, ttl_s: u64) -> Lease {
        Lease {
            resource: Resource::new("sku-1").unwrap(),
            id: LeaseId::random(),
            token: Token::new(token).unwrap(),
            ttl: Duration::from_secs(ttl_s),
            signed: None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_highest_token_counts_and_the_time_by_the_last_request() {
        let began = Instant::now();
        let after = |seconds| began + Duration::from_secs(seconds);
        let held = HeldLease::new(&lease(5, 10), began, FENCING_TOKEN);
        held.renewed(&lease(4, 10), after(2));
        assert_eq!((held.token().get(), held.until()), (5, after(12)));
        // An answer that was overtaken.
        held.asks_for_new_token();
        held.renewed_with_new_token(&lease(6, 60), after(1));
        assert_eq!((held.token().get(), held.until()), (6, after(12)));
    }

    #[tokio::test(start_paused = true)]
    async fn another_token_that_nobody_asked_for_is_a_loss() {
        let now = Instant::now();
        let held = HeldLease::new(&lease(5, 10), now, FENCING_TOKEN);
        // This one may have been taken, though it was not answered.
        held.asks_for_new_token();
        held.renewed(&lease(6, 10), now);
        assert_eq!(held.token().get(), 6);
        held.renewed_with_new_token(&lease(7, 10), now);
        assert!(held.lost().is_none());
        held.renewed(&lease(8, 10), now);
        assert!(matches!(held.lost(), Some(Loss::Refused { .. })));
        assert_eq!(held.token().get(), 7);
    }
}
