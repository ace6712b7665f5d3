//! The fence's checks of tokens that the store grants again, tokens that two servers grant, and
//! tokens that a client has forged.

mod alone;
mod bounds;
mod database;
mod loss;
mod one_database;
mod request;
mod rules;
pub mod state;
mod walk;
mod write;

use stateright::{Model, Property};

use self::{
    bounds::{large, small},
    database::EPOCH,
    rules::{Promise, Rules},
    state::{HOLDERS, Holder, Kind, Of, Phase, State},
};
use crate::search::World;

pub use self::{bounds::Bounds, loss::Loss, rules::Rule};

/// The maximum number of reconnections of issuers after a promotion.
const RECONNECTS: u8 = 2;

/// The world of a fence that takes precedence over the lease store.
#[derive(Clone, Debug)]
pub struct LastWord {
    pub bounds: Bounds,
    rules: Rules,
}

impl LastWord {
    /// Creates the world with all rules.
    pub fn within(bounds: Bounds) -> Self {
        let rules = Rules::default();
        Self { bounds, rules }
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
    IsAnnounced(Of),
    TakesHigherToken(Of),
    IsStillHeldAndAnswered(Of),
    /// The announcement was fast, so the request is answered without another check of the lease.
    IsAnswered(Of),
    IsReleased(Of),
    Reads(Of),
    Writes(Of),
    /// The write is delayed, and its holder continues without an answer.
    WriteIsDelayed(Of),
    DelayedWriteArrives,
    LeaseExpires {
        server: usize,
    },
    /// An issuer reconnects, and may find either server.
    Reconnects {
        issuer: u8,
    },
    /// A client writes under a token that was not granted.
    Forge {
        token: u8,
        reusable: bool,
    },
    /// A lease on another resource of the partition is granted.
    NeighbourIsGranted,
    /// Redis saves its keys.
    RedisIsSaved,
    /// The standby of the database stops replicating.
    StandbyFallsBehind,
    Lose(Loss),
}

impl World for LastWord {
    type Rule = Rule;
    const NAME: &'static str = "Precedence of the fence";
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

impl Model for LastWord {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State::default()]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for place in 0..=HOLDERS {
            if let Some(request) = &state.requests[place] {
                steps.push(Self::goes_on(Of(place), request));
                if matches!(request.phase, Phase::Announced(_)) {
                    steps.push(Step::IsAnswered(Of(place)));
                }
                let is_free = state.requests[HOLDERS].is_none();
                if place < HOLDERS && is_free && state.abandoned < self.bounds.abandoned {
                    steps.push(Step::Abandon(Of(place)));
                }
            }
        }
        for holder in 0..self.bounds.holders {
            // Holders begin in order.
            if holder > 0 && state.holders[holder - 1] == Holder::New {
                break;
            }
            if state.requests[holder].is_none() {
                self.asks(state, holder, steps);
            }
            self.works(state, holder, steps);
        }
        if state.delayed.is_some() {
            steps.push(Step::DelayedWriteArrives);
        }
        for (server, keys) in state.servers.iter().enumerate() {
            if keys.lease.is_some() {
                steps.push(Step::LeaseExpires { server });
            }
        }
        if state.master == 1 && state.reconnects < RECONNECTS {
            steps.extend((0..self.bounds.issuers).map(|issuer| Step::Reconnects { issuer }));
        }
        if state.neighbours < self.bounds.neighbours {
            steps.push(Step::NeighbourIsGranted);
        }
        self.losses(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut state = state.clone();
        match step {
            Step::Ask(kind, holder, issuer) => Self::ask(&mut state, holder, issuer, kind),
            Step::Abandon(of) => {
                state.abandoned += 1;
                state.requests[HOLDERS] = state.requests[of.0].take();
            }
            Step::ScriptRuns(of) => self.run_script(&mut state, of),
            Step::IsAnnounced(of) => self.announce(&mut state, of),
            Step::TakesHigherToken(of) => self.take_higher(&mut state, of),
            Step::IsStillHeldAndAnswered(of) => self.confirm(&mut state, of),
            Step::IsAnswered(of) => self.answer_at_once(&mut state, of),
            Step::IsReleased(of) => self.release_lost(&mut state, of),
            Step::Reads(_) | Step::Writes(_) | Step::WriteIsDelayed(_) => {
                self.work(&mut state, step)
            }
            Step::DelayedWriteArrives => self.arrive(&mut state),
            Step::Forge { token, reusable } => self.forge(&mut state, token, reusable),
            Step::LeaseExpires { server } => state.servers[server].lease = None,
            Step::Reconnects { issuer } => {
                state.reconnects += 1;
                let server = &mut state.issuers[usize::from(issuer)].server;
                *server = 1 - *server;
            }
            Step::NeighbourIsGranted => {
                state.neighbours += 1;
                state.servers[usize::from(state.master)].counter += 1;
            }
            Step::RedisIsSaved => {
                state.saved = Some(state.servers[usize::from(state.master)].clone());
            }
            Step::StandbyFallsBehind => state.standby = Some(state.database.clone()),
            Step::Lose(loss) => self.lose(&mut state, loss),
        }
        let mut counters = state.servers.iter().map(|server| server.counter / EPOCH);
        if counters.any(|epoch| epoch > state.past.epoch.max(1)) {
            state.past.breaks(Promise::OwnCounter);
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = Promise::properties();
        properties.extend([
            Property::always(
                "no token blocks a resource",
                |world: &Self, state: &State| world.grants_who_is_alone(state),
            ),
            Property::sometimes("every holder has written", |world: &Self, state: &State| {
                state.past.wrote + 1 == 1 << world.bounds.holders
            }),
        ]);
        if self.bounds.forged > 0 {
            properties.push(Property::sometimes(
                "a holder writes after a token was forged",
                |_: &Self, state: &State| state.past.wrote_after_forgery,
            ));
        }
        properties
    }
}
