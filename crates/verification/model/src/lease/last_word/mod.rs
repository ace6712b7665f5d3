//! The fence's checks of tokens that the store grants again, tokens that two servers grant, and
//! tokens that a client has forged.

mod alone;
mod bounds;
mod database;
mod loss;
mod request;
pub mod state;
mod write;

use stateright::{Model, Property};

use self::{
    database::EPOCH,
    state::{HOLDERS, Holder, Kind, Of, Phase, State},
};

pub use self::{bounds::LastWord, loss::Loss};
use crate::search::{promises, rules};

promises! {
    LastWord, |state| state.past.broken,
    NoLostUpdate: "no write overwrites an update that its holder has not read",
    OlderIsStale: "after an answer under a token, older tokens are stale",
    Distinct: "no two leases have the same token",
    Later: "a later grant has a higher token",
    Stands: "without a fault, the holder of a valid lease is not refused",
    OwnCounter: "no forged token changes a token counter",
}

rules! {
    Announce: "a grant is announced before it is answered",
    Raise: "an announcement makes older tokens stale",
    OnDisk: "an announcement is on disk before the answer",
    Highest: "the row stores the highest announced token",
    WhoseLease: "the row stores the lease of the announced token",
    Repeats: "the last announcement may be repeated",
    Lift: "a superseded grant gets a higher token",
    OfTheStore: "the store, not the announcement, assigns the higher token",
    LiftCompares: "only a lease that is still held gets the higher token",
    CounterStays: "the higher token does not change the token counter",
    NoneBetween: "another lease or a foreign token supersedes a renewal, even below its new token",
    Ends: "a token above the announced one ends the announcement",
    NewToken: "a renewal with a new token is announced",
    OfOthers: "a renewal announces a token that another process has assigned",
    MoveUp: "after a change of the timeline, all earlier tokens are stale",
}

/// The maximum number of reconnections of issuers after a promotion.
const RECONNECTS: u8 = 2;

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
                if place < HOLDERS && is_free && state.abandoned < self.abandoned {
                    steps.push(Step::Abandon(Of(place)));
                }
            }
        }
        for holder in 0..self.holders {
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
            steps.extend((0..self.issuers).map(|issuer| Step::Reconnects { issuer }));
        }
        if state.neighbours < self.neighbours {
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
            Step::ScriptRuns(of)
            | Step::IsAnnounced(of)
            | Step::TakesHigherToken(of)
            | Step::IsStillHeldAndAnswered(of)
            | Step::IsReleased(of) => self.go_on(&mut state, of, false),
            Step::IsAnswered(of) => self.go_on(&mut state, of, true),
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
        let (always, sometimes) = (Property::<Self>::always, Property::<Self>::sometimes);
        let mut properties = Promise::properties();
        properties.extend([
            always("no token blocks a resource", |world, state| {
                world.grants_who_is_alone(state)
            }),
            sometimes("every holder has written", |world, state| {
                state.past.wrote + 1 == 1 << world.holders
            }),
        ]);
        if self.forged > 0 {
            properties.push(sometimes(
                "a holder writes after a token was forged",
                |_, state| state.past.wrote_after_forgery,
            ));
        }
        properties
    }
}
