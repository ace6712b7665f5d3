//! The locks, and the transactions that wait for other transactions.

use super::{
    Floors, Rule,
    state::{Attempt, Removal, State, Who},
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
}

impl Floors {
    /// Whether a transaction waits for itself, directly or through other transactions.
    pub(super) fn is_deadlocked(&self, state: &State) -> bool {
        Party::ALL.into_iter().any(|first| {
            let mut waits_for = vec![first];
            let mut seen = 0;
            while let Some(party) = waits_for.get(seen).copied() {
                seen += 1;
                for other in Party::ALL {
                    if self.waits_for(state, party, other) {
                        if other == first {
                            return true;
                        }
                        if !waits_for.contains(&other) {
                            waits_for.push(other);
                        }
                    }
                }
            }
            false
        })
    }

    fn waits_for(&self, state: &State, party: Party, other: Party) -> bool {
        if party == other {
            return false;
        }
        let whole = self.one_writer && is_writing(state, other);
        match party {
            Party::Of(who) => {
                let holder = state.holders[who as usize];
                match holder.attempt {
                    Attempt::Sent(_) | Attempt::ReadFloor(..) => {
                        has_row(state, other, holder.resource as usize) || whole
                    }
                    Attempt::NoRow(_) => {
                        has_floor(state, other) && self.rules.has(Rule::FloorIsLocked) || whole
                    }
                    Attempt::None | Attempt::Has(..) => false,
                }
            }
            // A removal skips rows that are locked.
            Party::Removal => match state.removal {
                Removal::Asked(_) if self.rules.has(Rule::FloorIsLockedFirst) => {
                    shares_floor(state, other) && self.rules.has(Rule::FloorIsLocked) || whole
                }
                Removal::Removed(_, false) => {
                    shares_floor(state, other) && self.rules.has(Rule::FloorIsLocked)
                }
                _ => false,
            },
        }
    }
}

fn has_row(state: &State, party: Party, resource: usize) -> bool {
    match party {
        Party::Of(who) => {
            let holder = state.holders[who as usize];
            holder.resource as usize == resource && matches!(holder.attempt, Attempt::Has(..))
        }
        Party::Removal => {
            matches!(state.removal, Removal::Removed(removed, _) if removed as usize == resource)
        }
    }
}

fn shares_floor(state: &State, party: Party) -> bool {
    let Party::Of(who) = party else {
        return false;
    };
    let attempt = state.holders[who as usize].attempt;
    matches!(attempt, Attempt::ReadFloor(..) | Attempt::Has(_, true))
}

fn has_floor(state: &State, party: Party) -> bool {
    let has = matches!(
        state.removal,
        Removal::LockedFloor(_) | Removal::Removed(_, true)
    );
    party == Party::Removal && has
}

fn is_writing(state: &State, party: Party) -> bool {
    match party {
        Party::Of(who) => matches!(state.holders[who as usize].attempt, Attempt::Has(..)),
        Party::Removal => matches!(
            state.removal,
            Removal::LockedFloor(_) | Removal::Removed(..)
        ),
    }
}
