//! Requests during which no other client takes a step: the outcome of such a request, and walks of
//! whole calls, which a real store can take.

use stateright::Model;

use super::{
    Losses, Step,
    state::{HOLDERS, Holder, Kind, Of, Phase, State},
};

/// The maximum number of its own steps that a request may need.
const STEPS: usize = 12;

impl Losses {
    /// Whether each holder that acquires a lease gets it, or receives the answer that another
    /// holder has it. Only requests that wait for a script are examined, because all other steps
    /// lead to a script.
    pub(super) fn answers_who_is_alone(&self, state: &State) -> bool {
        (0..HOLDERS).all(|holder| match &state.requests[holder] {
            Some(request) if matches!(request.phase, Phase::Sent { .. }) => match request.kind {
                Kind::Acquire => self.gets_it_alone(state, holder, request.issuer),
                _ => true,
            },
            _ => true,
        })
    }

    fn gets_it_alone(&self, state: &State, holder: usize, issuer: u8) -> bool {
        let mut state = state.clone();
        for _ in 0..STEPS {
            if state.requests[holder].is_none() {
                return self.is_answered(&state, holder, issuer);
            }
            self.go_on(&mut state, Of(holder));
        }
        false
    }

    fn is_answered(&self, state: &State, holder: usize, issuer: u8) -> bool {
        let id = u8::try_from(holder).expect("there are few holders");
        let server = usize::from(state.issuers[usize::from(issuer)].server);
        let keys = &state.servers[server].keys;
        let lease = &keys.leases[self.resource(id)];
        let is_held = lease.as_ref().is_some_and(|lease| lease.id != id);
        let mut counter = keys.counter.iter();
        let is_of_another =
            counter.any(|counter| usize::from(counter.source) != self.application(id));
        matches!(state.holders[holder], Holder::Holds(_)) || is_held || is_of_another
    }

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
            self.go_on(&mut state, Of(place));
        }
        state
    }
}
