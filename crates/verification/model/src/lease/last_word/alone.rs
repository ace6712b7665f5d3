//! What becomes of a request while nobody else takes a step.

use stateright::Model;

use super::{
    LastWord,
    request::ATTEMPTS,
    state::{HOLDERS, Holder, Kind, Of, Phase, Request, State},
};

impl LastWord {
    /// Whether each holder that acquires gets its lease, unless another one has it, or its own ends on the way. One that was
    /// overtaken too often may fail: the token that it is about to take may be too low by now, the next one is not.
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

/// Whether nobody else has the lease; and the request itself has it, as soon as it was granted by the store.
fn is_free(state: &State, request: &Request) -> bool {
    let server = state.issuers[usize::from(request.issuer)].server;
    match state.servers[usize::from(server)].lease {
        Some((id, _)) => id == request.id,
        None => request.phase == Phase::Sent,
    }
}
