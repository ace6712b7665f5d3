//! What a process knows of a lease that it holds.

use std::{sync::Arc, time::Duration};

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
    bounds: Bounds,
    state: watch::Sender<State>,
}

/// What ends the lease for its holder before the store does.
#[derive(Clone, Copy, Default)]
pub(super) struct Bounds {
    /// How long it may be held.
    pub(super) max_hold: Option<Duration>,
    /// How long its work may be without progress.
    pub(super) progress_timeout: Option<Duration>,
}

struct State {
    /// The newest one, as the issuer has written it.
    token: FencingToken,
    /// When the lease ends, by the answers so far.
    until: Instant,
    /// When the request was sent whose answer says so.
    asked_at: Instant,
    /// When the lease was first held.
    held_since: Instant,
    /// When the work last reported progress.
    progress_at: Instant,
    /// How many requests for a new token are in flight: each of them may take one.
    in_flight: usize,
    /// Since when a request for a new token has failed, which may have taken one all the same.
    in_doubt: Option<Instant>,
    /// Why the last renewal did not get through.
    failure: Option<LeaseError>,
    lost: Option<Loss>,
}

impl HeldLease {
    pub(super) fn new(
        lease: &Lease,
        asked_at: Instant,
        header: HeaderName,
        bounds: Bounds,
    ) -> Self {
        metrics::held(1.0);
        let now = Instant::now();
        Self {
            resource: lease.resource.clone(),
            header,
            bounds,
            state: watch::Sender::new(State {
                token: lease.fencing_token(),
                until: end(lease, asked_at),
                asked_at,
                held_since: now,
                progress_at: now,
                in_flight: 0,
                in_doubt: None,
                failure: None,
                lost: None,
            }),
        }
    }

    pub(super) fn token(&self) -> Token {
        self.state.borrow().token.token
    }

    /// When the lease ends in the store, by the answers so far.
    pub(super) fn until(&self) -> Instant {
        self.state.borrow().until
    }

    /// When the lease ends for its holder, unless it is renewed, or the work reports progress.
    pub(super) fn ends_at(&self) -> Instant {
        self.end(&self.state.borrow()).0
    }

    fn end(&self, state: &State) -> (Instant, Ending) {
        let after =
            |since: Instant, time: Option<Duration>| time.and_then(|time| since.checked_add(time));
        let mut first = (state.until, Ending::Expired);
        for (end, ending) in [
            (
                after(state.held_since, self.bounds.max_hold),
                Ending::MaxHold,
            ),
            (
                after(state.progress_at, self.bounds.progress_timeout),
                Ending::NoProgress,
            ),
        ] {
            if let Some(end) = end.filter(|end| *end < first.0) {
                first = (end, ending);
            }
        }
        first
    }

    /// Notes that the work makes progress. A lease that was lost before stays lost.
    pub(super) fn progress(&self) {
        if self.lost().is_none() {
            self.state
                .send_modify(|state| state.progress_at = Instant::now());
        }
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
            if state.lost.is_some() || Instant::now() < self.end(&state).0 {
                return state.lost.clone();
            }
        }
        self.state.send_if_modified(|state| {
            let (end, ending) = self.end(state);
            let is_over = state.lost.is_none() && Instant::now() >= end;
            if is_over {
                let resource = self.resource.clone();
                let loss = match ending {
                    Ending::Expired => Loss::Expired {
                        resource,
                        cause: state.failure.take(),
                    },
                    Ending::MaxHold => Loss::MaxHold { resource },
                    Ending::NoProgress => Loss::NoProgress { resource },
                };
                loss.count();
                state.lost = Some(loss);
            }
            is_over
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
    pub(super) fn asks_for_new_token(&self) -> NewTokenRequest<'_> {
        self.state.send_modify(|state| state.in_flight += 1);
        NewTokenRequest { held: self }
    }

    /// Notes the answer to a renewal that was sent at this time and keeps the token. Another token tells
    /// that the lease was over meanwhile, and was granted anew under its id, to a repeated request that
    /// came late: what was read under the old one may be written over by now.
    pub(super) fn renewed(&self, lease: &Lease, asked_at: Instant) {
        let is_another = {
            let state = self.state.borrow();
            lease.token > state.token.token && state.in_flight == 0 && state.in_doubt.is_none()
        };
        if is_another {
            let resource = self.resource.clone();
            self.lose(Loss::Refused { resource });
        }
        self.state.send_modify(|state| {
            // This answer shows what became of a request that had failed before.
            state.in_doubt = state.in_doubt.filter(|since| asked_at < *since);
        });
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
                self.end(&state).0
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

/// Why a lease ends by time.
#[derive(Clone, Copy)]
enum Ending {
    Expired,
    MaxHold,
    NoProgress,
}

/// A request for a new token. Dropped without an answer, it may have taken one.
#[must_use]
pub(super) struct NewTokenRequest<'a> {
    held: &'a HeldLease,
}

impl NewTokenRequest<'_> {
    /// Notes the lease that was answered to the request, which was sent at this time.
    pub(super) fn answered(self, lease: &Lease, asked_at: Instant) {
        self.held.note(lease, asked_at);
        self.had_no_doubt();
    }

    /// Notes that the request was refused, and so took no token.
    pub(super) fn refused(self) {
        self.had_no_doubt();
    }

    fn had_no_doubt(self) {
        self.held.state.send_modify(|state| state.in_flight -= 1);
        std::mem::forget(self);
    }
}

impl Drop for NewTokenRequest<'_> {
    fn drop(&mut self) {
        self.held.state.send_modify(|state| {
            state.in_flight -= 1;
            state.in_doubt = Some(Instant::now());
        });
    }
}

/// When a lease ends that was asked for at this time.
fn end(lease: &Lease, asked_at: Instant) -> Instant {
    asked_at.checked_add(lease.ttl).unwrap_or(asked_at)
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

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

    fn held(lease: &Lease, bounds: Bounds) -> HeldLease {
        HeldLease::new(lease, Instant::now(), FENCING_TOKEN, bounds)
    }

    #[tokio::test(start_paused = true)]
    async fn the_highest_token_counts_and_the_time_by_the_last_request() {
        let began = Instant::now();
        let after = |seconds| began + Duration::from_secs(seconds);
        let held = held(&lease(5, 10), Bounds::default());
        held.renewed(&lease(4, 10), after(2));
        assert_eq!((held.token().get(), held.until()), (5, after(12)));
        // An answer that was overtaken.
        held.asks_for_new_token().answered(&lease(6, 60), after(1));
        assert_eq!((held.token().get(), held.until()), (6, after(12)));
    }

    #[tokio::test(start_paused = true)]
    async fn another_token_that_was_not_requested_is_a_loss() {
        let now = Instant::now();
        let held = held(&lease(5, 10), Bounds::default());
        // This one may have been taken, though it was not answered.
        let request = held.asks_for_new_token();
        held.renewed(&lease(6, 10), now);
        assert_eq!(held.token().get(), 6);
        request.answered(&lease(7, 10), now);
        // Refused, it took none.
        held.asks_for_new_token().refused();
        assert!(held.lost().is_none());
        held.renewed(&lease(8, 10), now);
        assert!(matches!(held.lost(), Some(Loss::Refused { .. })));
        assert_eq!(held.token().get(), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn loss_detection_resumes_after_a_failed_request_for_a_new_token() {
        let held = held(&lease(5, 10), Bounds::default());
        let before = Instant::now();
        sleep(Duration::from_secs(1)).await;
        // It was executed, and its answer was lost.
        drop(held.asks_for_new_token());
        // An answer to an earlier renewal says nothing about it, a later one does.
        held.renewed(&lease(5, 10), before);
        held.renewed(&lease(6, 10), Instant::now());
        assert!(held.lost().is_none());
        held.renewed(&lease(7, 10), Instant::now());
        assert!(matches!(held.lost(), Some(Loss::Refused { .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_ends_at_the_first_of_its_bounds() {
        let seconds = Duration::from_secs;
        let bounds = Bounds {
            max_hold: Some(seconds(60)),
            progress_timeout: Some(seconds(20)),
        };
        let long = lease(5, 1_000);
        let held = held(&long, bounds);
        for _ in 0..3 {
            sleep(seconds(19)).await;
            assert!(held.lost().is_none());
            held.progress();
        }
        sleep(seconds(3)).await;
        assert!(matches!(held.lost(), Some(Loss::MaxHold { .. })));
        held.progress();
        assert!(matches!(held.lost(), Some(Loss::MaxHold { .. })));

        let held = super::tests::held(&long, bounds);
        sleep(seconds(20)).await;
        assert!(matches!(held.lost(), Some(Loss::NoProgress { .. })));
    }
}
