//! Removed rows and the floor of their partition: [`Floors`]. The world has two resources of one
//! partition.
//!
//! In this world, a resource may have no row. A first write has two statements: an UPDATE, which
//! finds no row, and an INSERT, which reads the floor and then waits for any transaction that has
//! locked the row.

mod locks;
mod state;
mod steps;

use stateright::{Model, Property};

pub use self::{
    state::{Attempt, FORGED, Holder, Lease, MOVE, Outcome, Removal, Resource, State, Use, Who},
    steps::Step,
};
use crate::search::{World, rules};

rules! {
    Floor: "the removal of a row raises the floor to the row's `max_token`",
    FloorGoesUp: "the floor is never lowered",
    AdmittedAboveFloor: "a first write needs a token above the floor",
    RaisedAboveFloor: "a raise creates no row below the floor",
    FloorIsLocked: "a transaction that creates a row locks the floor that it reads",
    FloorIsLockedFirst: "a removal locks the floor before it locks rows",
    ReadAgain: "a removal checks again, under the lock, that a row is idle",
    HeldAreSpared: "a row is kept while its `max_token` is not below the token of a held lease",
    OutliersAreSpared: "a row whose `max_token` is above all granted tokens is kept",
    FloorMovesUp: "after a failover, the floor refuses all earlier tokens",
}

#[derive(Clone, Debug)]
pub struct Floors {
    pub holders: usize,
    /// The maximum number of removals.
    pub removals: u8,
    /// The number of requests of each holder.
    pub requests: u8,
    /// The number of writes under a forged token.
    pub strangers: u8,
    /// The number of failovers to a standby that lacks the last transactions.
    pub failovers: u8,
    /// Whether a write locks the whole database, as in SQLite.
    pub one_writer: bool,
    pub rules: Rules,
}

impl Floors {
    pub fn small() -> Self {
        Self {
            holders: 2,
            removals: 2,
            requests: 2,
            strangers: 1,
            failovers: 0,
            one_writer: false,
            rules: Rules::default(),
        }
    }

    /// Small bounds with a failover.
    pub fn failing_over() -> Self {
        Self {
            removals: 1,
            strangers: 0,
            failovers: 1,
            ..Self::small()
        }
    }

    pub fn large() -> Self {
        Self {
            holders: 3,
            removals: 1,
            strangers: 0,
            ..Self::small()
        }
    }
}

impl World for Floors {
    type Rule = Rule;
    const NAME: &'static str = "Floors";
    const RULES: &'static [Rule] = Rule::ALL;

    fn worlds() -> Vec<Self> {
        vec![Self::small(), Self::failing_over()]
    }

    fn large_worlds() -> Vec<Self> {
        vec![Self::large()]
    }

    fn in_bounds_of(rule: Rule) -> Self {
        match rule {
            Rule::FloorMovesUp => Self::failing_over(),
            _ => Self::small(),
        }
    }

    fn leave_out(mut self, rule: Rule) -> Self {
        self.rules = Rules::without(rule);
        self
    }
}

impl Model for Floors {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State::new(self)]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        self.possible(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        Some(self.take(state, step))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let (always, sometimes) = (Property::<Self>::always, Property::<Self>::sometimes);
        vec![
            always(
                "a token that a removed row refused is still refused",
                |_, state| !state.stale_wrote,
            ),
            always(
                "a holder is refused only because of a newer token of its resource",
                |_, state| !state.refused_for_nothing,
            ),
            always("no two transactions wait for each other", |world, state| {
                !world.is_deadlocked(state)
            }),
            sometimes(
                "a resource is written again after its row was removed",
                |_, state| {
                    let mut resources = Resource::ALL.into_iter();
                    resources.any(|r| state.was_removed(r) && state.row(r).is_some())
                },
            ),
            sometimes("a floor refuses a holder", |_, state| {
                state.refused_by_floor
            }),
            sometimes(
                "a holder whose lease was held during a removal writes",
                |_, state| state.written_after_removal,
            ),
            sometimes("a holder writes after a failover", |world, state| {
                world.failovers == 0 || state.written_after_failover
            }),
        ]
    }
}
