//! State of a lease as its holder sees it.
//!
//! 1. The lease expires when its TTL has passed since the holder sent the last request to which the
//!    store has responded, even if the store's own record expires later.
//! 2. A lost lease stays lost, and its first loss is reported once.
//! 3. If a renewal returns a new token that this process cannot have requested, the lease was lost
//!    in between.

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

/// State of a lease as its holder sees it. The guard, the renewal task and the token layers share
/// this state.
pub(super) struct HeldLease {
    pub(super) resource: Resource,
    header: HeaderName,
    bounds: Bounds,
    state: watch::Sender<State>,
}

/// Limits set on the holder. If a limit is reached, the lease counts as lost, even if it is still
/// held in the store.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bounds {
    /// The maximum time for which the holder keeps the lease.
    pub(super) max_hold: Option<Duration>,
    /// The maximum time between two reports of progress.
    pub(super) progress_timeout: Option<Duration>,
}

struct State {
    /// The newest token, in the form in which the issuer sent it.
    token: FencingToken,
    /// When the lease expires, according to the store's responses.
    until: Instant,
    /// The time at which the holder sent the request whose response set `until`.
    asked_at: Instant,
    /// When this process began to hold the lease.
    held_since: Instant,
    /// When the work last reported progress.
    progress_at: Instant,
    /// The number of unanswered requests for a new token. The issuer may grant a token to each of
    /// them.
    in_flight: usize,
    /// When a request for a new token last failed without a response. The issuer may nevertheless
    /// have granted a token.
    in_doubt: Option<Instant>,
    /// Why the last renewal failed.
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
                until: expiry(lease, asked_at),
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

    /// Returns whether the issuer may have granted a token in a response that has not arrived.
    pub(super) fn may_have_newer_token(&self) -> bool {
        let state = self.state.borrow();
        state.in_flight > 0 || state.in_doubt.is_some()
    }

    pub(super) fn token(&self) -> Token {
        self.state.borrow().token.token
    }

    /// Returns when the lease counts as lost, unless the guard renews it or the work reports
    /// progress first.
    pub(super) fn ends_at(&self) -> Instant {
        self.end(&self.state.borrow()).0
    }

    /// Returns when the lease counts as lost, and which limit ends it.
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

    /// Records progress. A lost lease stays lost.
    pub(super) fn progress(&self) {
        if self.lost().is_none() {
            self.state
                .send_modify(|state| state.progress_at = Instant::now());
        }
    }

    pub(super) fn fencing_token(&self) -> FencingToken {
        self.state.borrow().token.clone()
    }

    /// Adds the token to the headers of a request and replaces any other token.
    pub(super) fn add_to(&self, headers: &mut HeaderMap) {
        // The conversion does not fail, because the field is an RFC 9651 List, which is ASCII.
        if let Ok(mut value) = HeaderValue::try_from(self.fencing_token().to_string()) {
            value.set_sensitive(true);
            headers.insert(self.header.clone(), value);
        }
    }

    /// Returns the loss if the lease is lost. If the lease has expired or reached one of its
    /// bounds, this method records the loss, even if the renewal task has not detected it yet.
    pub(super) fn lost(&self) -> Option<Loss> {
        {
            let state = self.state.borrow();
            if state.lost.is_some() || Instant::now() < self.end(&state).0 {
                return state.lost.clone();
            }
        }
        let mut loss = None;
        self.state.send_if_modified(|state| {
            let (end, ending) = self.end(state);
            let is_over = state.lost.is_none() && Instant::now() >= end;
            if is_over {
                let resource = self.resource.clone();
                loss = Some(match ending {
                    Ending::Expired => Loss::Expired {
                        resource,
                        cause: state.failure.take(),
                    },
                    Ending::MaxHold => Loss::MaxHold { resource },
                    Ending::NoProgress => Loss::NoProgress { resource },
                });
                state.lost.clone_from(&loss);
            }
            is_over
        });
        if let Some(loss) = loss {
            loss.count();
        }
        self.state.borrow().lost.clone()
    }

    /// Records a loss unless a loss is already recorded. Returns the first loss.
    pub(super) fn lose(&self, loss: Loss) -> Loss {
        let mut is_first = false;
        self.state.send_if_modified(|state| {
            is_first = state.lost.is_none();
            state.lost.get_or_insert_with(|| loss.clone());
            is_first
        });
        if is_first {
            loss.count();
        }
        let state = self.state.borrow();
        let given_up = || Loss::GivenUp {
            resource: self.resource.clone(),
        };
        state.lost.clone().unwrap_or_else(given_up)
    }

    /// Records that a new token is being requested.
    pub(super) fn begin_token_request(&self) -> NewTokenRequest<'_> {
        self.state.send_modify(|state| state.in_flight += 1);
        NewTokenRequest { held: self }
    }

    /// Records the response to a renewal that was sent at `asked_at` and did not request a new
    /// token.
    ///
    /// If the response contains a different token, the lease counts as lost. In this case, the
    /// store no longer held the lease, and granted a new one under the same id to a delayed retry.
    /// Another holder may have written in the meantime, so data that was read under the earlier
    /// token can be out of date.
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
            // If a request for a new token failed before this renewal was sent, this response shows
            // whether a token was granted, so the doubt is resolved.
            state.in_doubt = state.in_doubt.filter(|since| asked_at < *since);
        });
        self.note(lease, asked_at);
    }

    /// Records the store's response. A lost lease stays lost.
    fn note(&self, lease: &Lease, asked_at: Instant) {
        if self.lost().is_some() {
            return;
        }
        self.state.send_modify(|state| {
            // Responses can arrive out of order. The response to the most recent request takes
            // precedence.
            let is_last = asked_at >= state.asked_at;
            // An issuer can sign the same token with another key, so the latest signature is kept.
            if lease.token > state.token.token || (is_last && lease.token == state.token.token) {
                state.token = lease.fencing_token();
            }
            if is_last {
                state.asked_at = asked_at;
                state.until = expiry(lease, asked_at);
                state.failure = None;
            }
        });
    }

    /// Records why a renewal failed.
    pub(super) fn failed(&self, error: LeaseError) {
        self.state.send_modify(|state| state.failure = Some(error));
    }

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
                // `self` owns the sender, so `changed` does not fail.
                _ = watched.changed() => {}
                () = sleep_until(until) => {
                    self.lost();
                }
            }
        }
    }
}

/// Reason why a lease counts as lost although the store has not refused a renewal.
#[derive(Clone, Copy)]
enum Ending {
    Expired,
    MaxHold,
    NoProgress,
}

/// Request for a new token. If it is dropped before a response is recorded, the issuer may have
/// granted a token.
#[must_use]
pub(super) struct NewTokenRequest<'a> {
    held: &'a HeldLease,
}

impl NewTokenRequest<'_> {
    /// Records the lease that a response contains. The request was sent at `asked_at`.
    pub(super) fn answered(self, lease: &Lease, asked_at: Instant) {
        self.held.note(lease, asked_at);
        self.end_without_doubt();
    }

    /// Records that the request was refused, so no token was granted.
    pub(super) fn refused(self) {
        self.end_without_doubt();
    }

    /// Ends a request whose outcome is known. Unlike a drop of the request, records no doubt.
    fn end_without_doubt(self) {
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

/// Returns when the lease expires, given that its request was sent at `asked_at`.
fn expiry(lease: &Lease, asked_at: Instant) -> Instant {
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
    async fn highest_token_wins_and_the_last_request_sets_expiry() {
        let began = Instant::now();
        let after = |seconds| began + Duration::from_secs(seconds);
        let held = held(&lease(5, 10), Bounds::default());
        held.renewed(&lease(4, 10), after(2));
        assert_eq!((held.token().get(), held.ends_at()), (5, after(12)));
        // This response arrives out of order.
        held.begin_token_request().answered(&lease(6, 60), after(1));
        assert_eq!((held.token().get(), held.ends_at()), (6, after(12)));
    }

    #[test]
    fn observer_of_a_loss_may_use_the_guard() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _entered = runtime.enter();
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for bounds in [
                Bounds::default(),
                Bounds {
                    max_hold: Some(Duration::ZERO),
                    ..Bounds::default()
                },
            ] {
                let held = Arc::new(held(&lease(5, 10), bounds));
                let observed = Arc::clone(&held);
                let log = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE);
                let observer = log.with_writer(move || {
                    observed.token();
                    std::io::sink()
                });
                tracing::subscriber::with_default(observer.finish(), || {
                    let resource = held.resource.clone();
                    held.lost();
                    held.lose(Loss::Refused { resource });
                });
            }
            done.send(()).unwrap();
        });
        let waited = ended.recv_timeout(Duration::from_secs(20));
        waited.expect("the observer waits for the guard's lock");
    }

    #[tokio::test(start_paused = true)]
    async fn unrequested_new_token_is_a_loss() {
        let now = Instant::now();
        let held = held(&lease(5, 10), Bounds::default());
        // No response is recorded yet, but the issuer may have granted a token.
        let request = held.begin_token_request();
        held.renewed(&lease(6, 10), now);
        assert_eq!(held.token().get(), 6);
        request.answered(&lease(7, 10), now);
        // A refused request grants no token.
        held.begin_token_request().refused();
        assert!(held.lost().is_none());
        held.renewed(&lease(8, 10), now);
        assert!(matches!(held.lost(), Some(Loss::Refused { .. })));
        assert_eq!(held.token().get(), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn loss_detection_resumes_after_a_failed_token_request() {
        let held = held(&lease(5, 10), Bounds::default());
        let before = Instant::now();
        sleep(Duration::from_secs(1)).await;
        // The issuer executed the request, but its response was lost.
        drop(held.begin_token_request());
        // The response to an earlier renewal does not resolve the doubt, but the response to a
        // later one does.
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
