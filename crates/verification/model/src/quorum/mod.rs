//! Leases on a quorum of Redis nodes. A token is chosen from the answers of a majority, and sealed
//! on a majority.

mod bounds;
mod client;
mod possible;
mod rules;
mod server;
mod state;
mod step;
mod steps;

use stateright::{Model, Property};

pub use self::{
    bounds::Bounds,
    client::{Choice, Progress, Request, Wish},
    rules::{Rule, Rules},
    server::{Answer, Counter, Key, Renewed, Sender, Server, Stamp, Taken, Token},
    state::{Holder, Name, Node, State},
    step::{At, Nodes, Of, Step},
};
use crate::search::World;

/// Nodes, clients, and the database that assigns epochs.
#[derive(Clone, Debug)]
pub struct Quorum {
    pub(crate) rules: Rules,
    pub bounds: Bounds,
}

impl Quorum {
    pub fn new(bounds: Bounds) -> Self {
        Self {
            rules: Rules::default(),
            bounds,
        }
    }

    /// Returns the initial state.
    pub fn begin(&self) -> State {
        let mut state = State::new(self.bounds.nodes, self.bounds.has_counted);
        if self.bounds.first_is_granted {
            state = self.first_granted(state);
        }
        for node in &mut state.nodes {
            node.saved = Some(node.server).filter(|_| self.bounds.saved);
        }
        state
    }

    /// Returns the possible steps.
    pub fn steps(&self, state: &State) -> Vec<Step> {
        let mut steps = vec![];
        for (n, request) in self.bounds.requests.iter().enumerate() {
            self.request_steps(state, Of(n, *request), &mut steps);
        }
        for at in state.servers() {
            self.call_steps(state, at, &mut steps);
            self.fault_steps(state, at, &mut steps);
        }
        steps
    }
}

impl World for Quorum {
    type Rule = Rule;

    const NAME: &'static str = "A quorum of Redis nodes";
    const RULES: &'static [Rule] = Rule::ALL;

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

impl Model for Quorum {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![self.begin()]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        steps.extend(self.steps(state));
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let (next, _) = self.step(state, step)?;
        Some(next).filter(|next| next != state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no two leases have the same token", one_lease_a_token),
            Property::always("a later grant has a higher token", tokens_go_up),
            Property::always(
                "a superseded lease is not renewed",
                no_superseded_lease_is_renewed,
            ),
            Property::always(
                "only its own release removes a valid lease",
                |_: &Self, state: &State| !state.ended_live,
            ),
            Property::always(
                "a lease that a majority of the nodes stores is renewed",
                |_: &Self, state: &State| !state.lost_live,
            ),
            Property::sometimes(
                "the last request is granted",
                |this: &Self, state: &State| {
                    state.requests[this.bounds.requests.len() - 1]
                        .granted
                        .is_some()
                },
            ),
            Property::sometimes(
                "a lease is granted after all restarts",
                |this: &Self, state: &State| {
                    let first = u8::from(this.bounds.has_counted);
                    let restarts = this.bounds.most.restarts;
                    let mut granted = state.requests.iter().filter_map(|request| request.granted);
                    granted.any(|token| token.epoch >= first + restarts)
                },
            ),
            Property::sometimes(
                "every renewal is confirmed",
                |this: &Self, state: &State| {
                    let mut renewals = state.renewals[..this.bounds.renewals.len()].iter();
                    renewals.all(|renewal| renewal.renewed.is_some())
                },
            ),
        ]
    }
}

/// Returns the tokens that were returned to clients, each with its lease and resource.
fn answered(world: &Quorum, state: &State) -> impl Iterator<Item = (u8, usize, Token)> {
    let requests = world.bounds.requests.iter().zip(state.requests);
    requests.filter_map(|(of, request)| Some((of.lease, of.resource, request.granted?)))
}

fn one_lease_a_token(world: &Quorum, state: &State) -> bool {
    let all = || answered(world, state);
    all().all(|(lease, resource, token)| {
        !all().any(|other| other.0 != lease && (other.1, other.2) == (resource, token))
    })
}

fn tokens_go_up(_: &Quorum, state: &State) -> bool {
    let requests = state.requests.iter().all(|request| {
        let (granted, before) = (request.granted, request.before);
        let is_higher =
            |(token, before): (Token, client::Before)| token >= before.own && token > before.others;
        granted.zip(before).is_none_or(is_higher)
    });
    let mut renewals = state.renewals.iter();
    requests
        && renewals.all(|renewal| {
            let renewed = renewal.renewed.zip(renewal.before);
            renewed.is_none_or(|(token, before)| token >= before.own)
        })
}

fn no_superseded_lease_is_renewed(_: &Quorum, state: &State) -> bool {
    let mut requests = state.requests.iter();
    let mut renewals = state.renewals.iter();
    requests.all(|request| {
        let renews_superseded = request
            .choice
            .is_some_and(|choice| choice.renews_superseded);
        !renews_superseded || request.granted.is_none()
    }) && renewals.all(|renewal| {
        let renewed = renewal.renewed.zip(renewal.before);
        renewed.is_none_or(|(token, before)| token.min(before.own) > before.others)
    })
}
