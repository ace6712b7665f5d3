//! Walks that a real store can take: whole calls, one after the other.

use stateright::Model;

use super::{
    LastWord, Step,
    state::{Holder, Kind, Of, State},
};

impl LastWord {
    /// Returns the possible next calls and losses. A holder may also acquire its own lease once
    /// more.
    pub fn calls(&self, state: &State) -> Vec<Step> {
        let mut steps = Vec::new();
        self.actions(state, &mut steps);
        let holders = state.holders.iter().enumerate();
        for (holder, _) in holders.filter(|(_, holder)| matches!(holder, Holder::Holds(_))) {
            let ask = |issuer| Step::Ask(Kind::Acquire, Of(holder), issuer);
            steps.extend((0..self.bounds.issuers).map(ask));
        }
        steps
    }

    /// Takes a step, and then all steps of the request that it began.
    pub fn take(&self, state: &State, step: Step) -> State {
        let mut state = self.next_state(state, step).expect("the step is possible");
        while let Some(place) = state.requests.iter().position(Option::is_some) {
            let request = state.requests[place]
                .as_ref()
                .expect("this request is in progress");
            let next = Self::goes_on(Of(place), request);
            state = self.next_state(&state, next).expect("the step is possible");
        }
        state
    }
}
