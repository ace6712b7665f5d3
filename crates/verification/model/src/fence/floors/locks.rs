//! The locks, and the transactions that wait for other transactions.

use super::{
    Floors, Rule,
    state::{Attempt, Removal, Resource, State, Who},
};

/// A transaction that takes locks.
#[derive(Clone, Copy, PartialEq)]
enum Party {
    Of(Who),
    Removal,
}

impl Party {
    const ALL: [Self; 4] = [
        Self::Of(Who::A),
        Self::Of(Who::B),
        Self::Of(Who::C),
        Self::Removal,
    ];

    /// Whether the transaction has locked the row of a resource, or the index entry of a row that
    /// it creates.
    fn has_row(self, state: &State, resource: Resource) -> bool {
        match self {
            Self::Of(who) => {
                let holder = state.holders[who as usize];
                holder.resource == resource && matches!(holder.attempt, Attempt::Has(..))
            }
            Self::Removal => {
                matches!(state.removal, Removal::Removed(removed, _) if removed == resource)
            }
        }
    }

    /// Whether the transaction has a shared lock on the floor.
    fn shares_floor(self, state: &State) -> bool {
        let Self::Of(who) = self else {
            return false;
        };
        let attempt = state.holders[who as usize].attempt;
        matches!(attempt, Attempt::ReadFloor(..) | Attempt::Has(_, true))
    }

    /// Whether the transaction has changed something.
    fn has_written(self, state: &State) -> bool {
        match self {
            Self::Of(who) => matches!(state.holders[who as usize].attempt, Attempt::Has(..)),
            Self::Removal => matches!(
                state.removal,
                Removal::LockedFloor(_) | Removal::Removed(..)
            ),
        }
    }
}

impl State {
    /// Whether a transaction has locked the row of a resource.
    pub fn is_locked(&self, resource: Resource) -> bool {
        let mut all = Party::ALL.into_iter();
        all.any(|party| party.has_row(self, resource))
    }

    pub fn floor_is_shared(&self) -> bool {
        Party::ALL.into_iter().any(|party| party.shares_floor(self))
    }

    /// Whether the removal has locked the floor.
    pub fn floor_is_locked(&self) -> bool {
        matches!(
            self.removal,
            Removal::LockedFloor(_) | Removal::Removed(_, true)
        )
    }

    /// Whether an open transaction has changed something.
    pub fn is_written_to(&self) -> bool {
        Party::ALL.into_iter().any(|party| party.has_written(self))
    }
}

impl Floors {
    /// Whether transactions wait for each other: some transactions wait, and each of them waits for
    /// another one of them.
    pub(super) fn is_deadlocked(&self, state: &State) -> bool {
        let mut waiting = Party::ALL.to_vec();
        loop {
            let before = waiting.clone();
            waiting.retain(|party| {
                before
                    .iter()
                    .any(|other| self.waits_for(state, *party, *other))
            });
            if waiting == before {
                return !waiting.is_empty();
            }
        }
    }

    fn waits_for(&self, state: &State, party: Party, other: Party) -> bool {
        if party == other {
            return false;
        }
        let whole = self.one_writer && other.has_written(state);
        match party {
            Party::Of(who) => {
                let holder = state.holders[who as usize];
                match holder.attempt {
                    Attempt::Sent(_) | Attempt::ReadFloor(..) => {
                        other.has_row(state, holder.resource) || whole
                    }
                    Attempt::NoRow(_) => {
                        other == Party::Removal
                            && state.floor_is_locked()
                            && self.rules.has(Rule::FloorIsLocked)
                            || whole
                    }
                    Attempt::None | Attempt::Has(..) => false,
                }
            }
            // A removal skips rows that are locked.
            Party::Removal => match state.removal {
                Removal::Asked(_) if self.rules.has(Rule::FloorIsLockedFirst) => {
                    other.shares_floor(state) && self.rules.has(Rule::FloorIsLocked) || whole
                }
                Removal::Removed(_, false) => {
                    other.shares_floor(state) && self.rules.has(Rule::FloorIsLocked)
                }
                _ => false,
            },
        }
    }
}
