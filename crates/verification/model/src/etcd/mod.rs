//! Leases in etcd: transactions, etcd leases, and a status that shows whether etcd was restored.

mod bounds;
mod grant;
mod holder;
mod judge;
mod possible;
mod rules;
mod server;
mod state;
mod step;
mod steps;

use stateright::{Model, Property};

use self::{
    bounds::{Begins, Kind},
    rules::{Promise, Rules},
};
use crate::search::World;

pub use self::{
    bounds::{Bounds, Request},
    rules::Rule,
    state::State,
    step::{Of, Step},
};

/// An etcd cluster, two issuers, and the database that assigns epochs.
#[derive(Clone, Debug)]
pub struct Etcd {
    rules: Rules,
    bounds: Bounds,
}

impl Etcd {
    pub fn new(bounds: Bounds) -> Self {
        Self {
            rules: Rules::default(),
            bounds,
        }
    }
}

impl World for Etcd {
    type Rule = Rule;

    const NAME: &'static str = "Leases in etcd";
    const RULES: &'static [Rule] = Rule::ALL;
    const BOUNDS_OF_RULES_ADD: bool = true;

    fn worlds() -> Vec<Self> {
        Bounds::small().into_iter().map(Self::new).collect()
    }

    fn large_worlds() -> Vec<Self> {
        Bounds::large().into_iter().map(Self::new).collect()
    }

    fn in_bounds_of(rule: Rule) -> Self {
        Self::new(Bounds::of_rule(rule))
    }

    fn leave_out(mut self, rule: Rule) -> Self {
        self.rules = Rules::without(rule);
        self
    }
}

impl Model for Etcd {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let mut state = State::new(&self.bounds);
        if self.bounds.first_is_granted {
            let of = Of(0, self.bounds.requests[0]);
            for step in [Step::LeaseGrant(of), Step::Txn(of), Step::Status(of)] {
                state = self
                    .step(&state, step)
                    .expect("the first request can be granted");
            }
        }
        state.saved = Some(state.etcd).filter(|_| self.bounds.is_saved);
        vec![state]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for (place, request) in self.bounds.requests.iter().enumerate() {
            let of = Of(place, *request);
            self.request_steps(state, of, steps);
            self.copies(state, of, steps);
        }
        self.fault_steps(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        self.step(state, step).filter(|next| next != state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = Promise::properties();
        properties.push(Property::sometimes(
            "each request is answered",
            all_are_answered,
        ));
        if self.bounds.most.restores > 0 {
            properties.push(Property::sometimes(
                "a lease is granted after the last restore",
                |world: &Self, state: &State| {
                    let mut tokens = state.requests.iter().filter_map(|request| request.token);
                    let first = u8::from(world.bounds.begins != Begins::Empty);
                    let is_over = state.spent.restores == world.bounds.most.restores;
                    is_over && tokens.any(|token| token.epoch > first)
                },
            ));
        }
        properties
    }
}

fn all_are_answered(world: &Etcd, state: &State) -> bool {
    let requests = world.bounds.requests.iter().zip(&state.requests);
    let is_answered = |(request, progress): (&Request, &state::Progress)| match request.kind {
        Kind::Release => progress.stage == state::Stage::Done,
        _ => progress.token.is_some(),
    };
    requests.into_iter().all(is_answered)
}
