//! Requests during which no other client takes a step: the outcome of such a request, and walks of
//! whole calls, which a real store can take.

use stateright::Model;

use super::{
    LastWord, Step,
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
        while state.requests[holder].is_some() {
            self.go_on(&mut state, Of(holder), false);
        }
        matches!(state.holders[holder], Holder::Holds(_))
    }

    /// Returns the possible next calls and losses. A holder may also acquire its own lease once
    /// more.
    pub fn calls(&self, state: &State) -> Vec<Step> {
        let mut steps = Vec::new();
        self.actions(state, &mut steps);
        let holders = state.holders.iter().enumerate();
        for (holder, _) in holders.filter(|(_, holder)| matches!(holder, Holder::Holds(_))) {
            let ask = |issuer| Step::Ask(Kind::Acquire, Of(holder), issuer);
            steps.extend((0..self.issuers).map(ask));
        }
        steps
    }

    /// Takes a step, and then all steps of the request that it began.
    pub fn take(&self, state: &State, step: Step) -> State {
        let mut state = self.next_state(state, step).expect("the step is possible");
        while let Some(place) = state.requests.iter().position(Option::is_some) {
            self.go_on(&mut state, Of(place), false);
        }
        state
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
