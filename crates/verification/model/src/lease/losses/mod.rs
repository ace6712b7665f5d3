//! A lease store and the source of its epochs, both of which may lose data. Grants are not
//! announced, so the store alone determines the tokens.

mod alone;
mod bounds;
mod database;
mod loss;
mod request;
mod rules;
pub mod server;
pub mod state;
mod walk;

use stateright::{Model, Property};

use self::{
    bounds::{large, small},
    rules::{Promise, Rules},
    state::{HOLDERS, Holder, Kind, Of, State},
};
use crate::search::World;

pub use self::{bounds::Bounds, loss::Loss, rules::Rule};

/// The maximum number of reconnections of issuers after a promotion.
const RECONNECTS: u8 = 2;

/// The world of a lease store and of databases, all of which may lose data.
#[derive(Clone, Debug)]
pub struct Losses {
    pub bounds: Bounds,
    rules: Rules,
}

impl Losses {
    /// Creates the world with all rules.
    pub fn within(bounds: Bounds) -> Self {
        let rules = Rules::default();
        Self { bounds, rules }
    }

    /// Returns the resource of a lease.
    fn resource(&self, id: u8) -> usize {
        usize::from(self.bounds.apart && usize::from(id) + 1 == self.bounds.holders)
    }

    /// Whether two leases have the same resource and the same fence, which compares their tokens.
    fn compare(&self, one: u8, other: u8) -> bool {
        self.resource(one) == self.resource(other)
            && self.application(one) == self.application(other)
    }

    /// Whether two holders are interchangeable.
    fn are_alike(&self, one: usize, other: usize) -> bool {
        let id = |holder| u8::try_from(holder).expect("there are few holders");
        self.compare(id(one), id(other))
    }

    /// Returns the application of an issuer or a holder.
    fn application(&self, number: u8) -> usize {
        usize::from(number) % self.bounds.applications
    }
}

/// A step of a holder, an issuer, a server or the database.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// A holder sends a request to this issuer.
    Ask(Kind, Of, u8),
    /// The caller disconnects, and the request continues.
    Abandon(Of),
    ScriptRuns(Of),
    EpochIsTaken(Of),
    EpochBegins(Of),
    MasterIsFoundAgain(Of),
    IsAnswered(Of),
    LeaseExpires {
        server: u8,
        resource: usize,
    },
    /// An issuer reconnects, and may find either server.
    Reconnects {
        issuer: u8,
    },
    /// Redis saves its file, or the replica starts to lag.
    RedisIsSaved,
    /// The standby of the database stops replicating.
    StandbyFallsBehind,
    /// Issuers report their epochs to the database.
    AMinutePasses,
    Lose(Loss),
}

impl World for Losses {
    type Rule = Rule;
    const NAME: &'static str = "Leases and losses";
    const RULES: &'static [Rule] = Rule::ALL;
    const BOUNDS_OF_RULES_ADD: bool = true;

    fn worlds() -> Vec<Self> {
        small().into_iter().map(Self::within).collect()
    }

    fn large_worlds() -> Vec<Self> {
        large().into_iter().map(Self::within).collect()
    }

    fn in_bounds_of(rule: Rule) -> Self {
        Self::within(rule.bounds())
    }

    fn leave_out(mut self, rule: Rule) -> Self {
        self.rules = Rules::without(rule);
        self
    }
}

impl Model for Losses {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State::default()]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for place in 0..=HOLDERS {
            if let Some(request) = &state.requests[place] {
                steps.push(Self::goes_on(Of(place), request));
                let is_free = state.requests[HOLDERS].is_none();
                if place < HOLDERS && is_free && state.abandoned < self.bounds.abandoned {
                    steps.push(Step::Abandon(Of(place)));
                }
            }
        }
        for holder in 0..self.bounds.holders {
            // Interchangeable holders begin in order.
            if holder > 0
                && state.holders[holder - 1] == Holder::New
                && self.are_alike(holder - 1, holder)
            {
                continue;
            }
            if state.requests[holder].is_none() {
                self.asks(state, holder, steps);
            }
        }
        for (number, server) in (0..).zip(&state.servers) {
            for (resource, lease) in server.keys.leases.iter().enumerate() {
                if lease.is_some() {
                    steps.push(Step::LeaseExpires {
                        server: number,
                        resource,
                    });
                }
            }
        }
        if state.master == 1 && state.reconnects < RECONNECTS {
            let issuers = 0..u8::try_from(self.bounds.issuers).expect("there are few issuers");
            let free = issuers.filter(|issuer| !state.has_epoch(*issuer));
            steps.extend(free.map(|issuer| Step::Reconnects { issuer }));
        }
        self.losses(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut state = state.clone();
        match step {
            Step::Ask(kind, holder, issuer) => self.ask(&mut state, holder, issuer, kind),
            Step::Abandon(of) => {
                state.abandoned += 1;
                state.requests[HOLDERS] = state.requests[of.0].take();
            }
            Step::ScriptRuns(of) => self.run_script(&mut state, of),
            Step::EpochIsTaken(of) => self.take_epoch(&mut state, of),
            Step::EpochBegins(of) => self.begin_epoch(&mut state, of),
            Step::MasterIsFoundAgain(of) => self.find_master(&mut state, of),
            Step::IsAnswered(of) => self.answer(&mut state, of),
            Step::LeaseExpires { server, resource } => {
                let server = &mut state.servers[usize::from(server)];
                let lease = server.keys.leases[resource]
                    .take()
                    .expect("the resource has a lease");
                state.past.ended |= 1 << lease.id;
            }
            Step::Reconnects { issuer } => {
                state.reconnects += 1;
                let server = &mut state.issuers[usize::from(issuer)].server;
                *server = 1 - *server;
            }
            Step::RedisIsSaved | Step::StandbyFallsBehind | Step::AMinutePasses | Step::Lose(_) => {
                self.lose(&mut state, step)
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = Promise::properties();
        properties.extend([
            Property::always(
                "no request is refused while all servers answer",
                |world: &Self, state: &State| world.answers_who_is_alone(state),
            ),
            Property::sometimes(
                "every holder was granted its lease",
                |world: &Self, state: &State| {
                    let holders =
                        0..u8::try_from(world.bounds.holders).expect("there are few holders");
                    holders.into_iter().all(|id| state.past.was_granted(id))
                },
            ),
        ]);
        if self.bounds.most > 0 {
            let after = |world: &Self, state: &State| {
                let last = state.past.answered.last();
                state.losses == world.bounds.most && last.is_some_and(|(_, id)| *id > 0)
            };
            properties.push(Property::sometimes(
                "a lease is granted after the last loss",
                after,
            ));
        }
        properties
    }
}
