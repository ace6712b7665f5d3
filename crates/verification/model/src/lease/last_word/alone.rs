//! The outcome of a request if no other client takes a step.

use stateright::Model;

use super::{
    LastWord,
    request::ATTEMPTS,
    state::{HOLDERS, Holder, Kind, Of, Phase, Request, State},
};

impl LastWord {
    /// Whether each holder that acquires a lease gets it, unless another holder has the lease or
    /// its own lease ends in the meantime. A request that was superseded too often may fail. The
    /// token that the request is about to take may already be too low, but the token after it is
    /// not.
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
            state = self.next_state(&state, next).expect("each step goes on");
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
