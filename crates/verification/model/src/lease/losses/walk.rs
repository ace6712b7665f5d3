//! Walks that a real store can take: whole calls, one after the other.

use stateright::Model;

use super::{
    Losses, Step,
    state::{Of, State},
};

impl Losses {
    /// Returns the possible next calls and losses.
    pub fn calls(&self, state: &State) -> Vec<Step> {
        let mut steps = Vec::new();
        self.actions(state, &mut steps);
        steps
    }

    /// Takes a step, and then all steps of the request that it began.
    pub fn take(&self, state: &State, step: Step) -> State {
        self.finish(self.next_state(state, step).expect("the step is possible"))
    }

    /// Like [`take`](Self::take), but the caller of the request disconnects immediately.
    pub fn take_abandoned(&self, state: &State, step: Step, holder: Of) -> State {
        let asked = self.next_state(state, step).expect("the step is possible");
        let abandoned = self.next_state(&asked, Step::Abandon(holder));
        self.finish(abandoned.expect("the step is possible"))
    }

    fn finish(&self, mut state: State) -> State {
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
