//! Walks that a real store can take: whole calls, one after the other.

use stateright::Model;

use super::{
    Losses, Step,
    state::{Of, State},
};

impl Losses {
    /// The calls that may come next, and what may be lost.
    pub fn calls(&self, state: &State) -> Vec<Step> {
        let mut steps = Vec::new();
        self.actions(state, &mut steps);
        steps
    }

    /// Takes a step, and then all those of the request that it began.
    pub fn take(&self, state: &State, step: Step) -> State {
        self.finish(self.next_state(state, step).expect("each step goes on"))
    }

    /// The same of a call whose caller goes away at once.
    pub fn take_abandoned(&self, state: &State, step: Step, holder: Of) -> State {
        let asked = self.next_state(state, step).expect("each step goes on");
        let abandoned = self.next_state(&asked, Step::Abandon(holder));
        self.finish(abandoned.expect("each step goes on"))
    }

    fn finish(&self, mut state: State) -> State {
        while let Some(place) = state.requests.iter().position(Option::is_some) {
            let request = state.requests[place].as_ref().expect("it is there");
            let next = Self::goes_on(Of(place), request);
            state = self.next_state(&state, next).expect("each step goes on");
        }
        state
    }
}
