//! The outcome of a request if no other client takes a step.

use stateright::Model;

use super::{
    Losses,
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
            let Some(request) = &state.requests[holder] else {
                return self.is_answered(&state, holder, issuer);
            };
            let next = Self::goes_on(Of(holder), request);
            state = self
                .next_state(&state, next)
                .expect("a request in progress has a next step");
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
}
