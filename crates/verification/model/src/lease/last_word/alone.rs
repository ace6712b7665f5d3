//! The outcome of a request if no other client takes a step.

use stateright::Model;

use super::{
    LastWord,
    request::ATTEMPTS,
    state::{HOLDERS, Holder, Kind, Of, Phase, Request, State},
};

impl LastWord {
    /// Whether each holder that acquires a lease gets it, if no other holder has the lease and the
    /// lease does not end in the meantime. The next token that a request takes may already be too
    /// low, so only requests with two attempts left are examined.
    pub(super) fn grants_who_is_alone(&self, state: &State) -> bool {
        (0..HOLDERS).all(|holder| match &state.requests[holder] {
            Some(request) if request.kind == Kind::Acquire && request.higher + 1 < ATTEMPTS => {
                !is_free(state, request) || self.gets_it_alone(state, holder)
            }
            _ => true,
        })
    }

    fn gets_it_alone(&self, state: &State, holder: usize) -> bool {
        let mut state = state.clone();
        while let Some(request) = &state.requests[holder] {
            let next = Self::goes_on(Of(holder), request);
            state = self
                .next_state(&state, next)
                .expect("a request in progress has a next step");
        }
        matches!(state.holders[holder], Holder::Holds(_))
    }
}

/// Whether no other holder has the lease. If the store has granted the lease to the request, the
/// request must still have it.
fn is_free(state: &State, request: &Request) -> bool {
    let server = state.issuers[usize::from(request.issuer)].server;
    match state.servers[usize::from(server)].lease {
        Some((id, _)) => id == request.id,
        None => request.phase == Phase::Sent,
    }
}
