//! The possible steps, and their effects.

use super::{
    Floors, Rule,
    state::{Attempt, FORGED, Lease, MOVE, Outcome, Removal, Resource, State, Use, Who},
};

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Step {
    Grant(Who, Resource),
    EndLease(Who),
    Send(Who, Use),
    /// The UPDATE of an existing row.
    Update(Who),
    /// The INSERT of a first write reads the floor.
    ReadFloor(Who),
    /// The INSERT creates the row, or finds that another transaction has created one.
    Insert(Who),
    Commit(Who),
    RollBack(Who),
    /// A client without a lease writes under a forged token.
    Forge(Resource),
    /// A removal begins: it reads which leases are held, and which rows are idle.
    Ask,
    LockFloor,
    Remove(Resource),
    CommitRemoval,
    RollBackRemoval,
    /// The standby stops replicating.
    FallBehind,
    FailOver,
    /// The fence moves all tokens up after a failover.
    CatchUp,
}

impl Floors {
    pub(super) fn possible(&self, state: &State, steps: &mut Vec<Step>) {
        for (place, who) in Who::ALL[..self.holders].iter().enumerate() {
            self.of_holder(state, *who, place, steps);
        }
        for resource in Resource::ALL {
            let free = !self.is_locked(state, resource);
            if state.strangers > 0 && free && state.row(resource).is_some() {
                steps.push(Step::Forge(resource));
            }
        }
        if state.changed {
            // The first transaction after a failover moves the tokens up.
            steps.push(Step::CatchUp);
            steps.retain(|step| {
                !matches!(
                    step,
                    Step::Update(_) | Step::ReadFloor(_) | Step::Insert(_) | Step::Forge(_)
                )
            });
        } else {
            self.of_removal(state, steps);
        }
        if state.failovers > 0 {
            steps.push(match state.standby {
                None => Step::FallBehind,
                Some(_) => Step::FailOver,
            });
        }
    }

    fn of_holder(&self, state: &State, who: Who, place: usize, steps: &mut Vec<Step>) {
        let holder = &state.holders[place];
        let free = !self.is_locked(state, holder.resource);
        match holder.lease {
            Lease::None => {
                // Holders are granted leases in order, one at a time on each resource.
                if place == 0 || state.holders[place - 1].lease != Lease::None {
                    for resource in Resource::ALL {
                        let is_held = state.holders.iter().any(|holder| {
                            holder.lease == Lease::Held && holder.resource == resource
                        });
                        if !is_held && (place > 0 || resource == Resource::R) {
                            steps.push(Step::Grant(who, resource));
                        }
                    }
                }
                return;
            }
            Lease::Held => steps.push(Step::EndLease(who)),
            Lease::Over => {}
        }
        match holder.attempt {
            Attempt::None => {
                if holder.requests > 0 {
                    steps.push(Step::Send(who, Use::Write));
                    steps.push(Step::Send(who, Use::Raise));
                }
            }
            Attempt::Sent(_) => {
                if free {
                    steps.push(Step::Update(who));
                }
            }
            Attempt::NoRow(_) => {
                if self.floor_can_be_read(state) {
                    steps.push(Step::ReadFloor(who));
                }
            }
            Attempt::ReadFloor(..) => {
                if free {
                    steps.push(Step::Insert(who));
                }
            }
            Attempt::Has(..) => {
                steps.push(Step::Commit(who));
                steps.push(Step::RollBack(who));
            }
        }
    }

    fn of_removal(&self, state: &State, steps: &mut Vec<Step>) {
        let shared = state.floor_is_shared() && self.rules.has(Rule::FloorIsLocked);
        let mut remove = |below| {
            for resource in Resource::ALL {
                let in_use = state.used[resource as usize] && self.rules.has(Rule::ReadAgain);
                let idle = state
                    .row(resource)
                    .is_some_and(|max_token| max_token < below);
                if idle && !in_use && !state.is_locked(resource) {
                    steps.push(Step::Remove(resource));
                }
            }
        };
        match state.removal {
            Removal::None => {
                if state.removals > 0 {
                    steps.push(Step::Ask);
                }
            }
            Removal::Asked(below) if !self.rules.has(Rule::FloorIsLockedFirst) => remove(below),
            Removal::Asked(_) => {
                if !(shared || self.one_writer && state.is_written_to()) {
                    steps.push(Step::LockFloor);
                }
            }
            Removal::LockedFloor(below) => {
                remove(below);
                steps.push(Step::RollBackRemoval);
            }
            Removal::Removed(_, has_floor) => {
                if has_floor || !shared {
                    steps.push(Step::CommitRemoval);
                }
                steps.push(Step::RollBackRemoval);
            }
        }
    }

    pub(super) fn take(&self, before: &State, step: Step) -> State {
        let mut state = before.clone();
        match step {
            Step::Grant(who, resource) => {
                let moved = MOVE * u8::from(before.failed_over);
                state.holders[who as usize].token = who as u8 + 1 + moved;
                state.holders[who as usize].lease = Lease::Held;
                state.holders[who as usize].resource = resource;
            }
            Step::EndLease(who) => state.holders[who as usize].lease = Lease::Over,
            Step::Send(who, wanted) => {
                let holder = &mut state.holders[who as usize];
                holder.requests -= 1;
                holder.outcome = None;
                holder.attempt = Attempt::Sent(wanted);
            }
            Step::Update(who) => self.update(&mut state, who),
            Step::ReadFloor(who) => {
                if let Attempt::NoRow(wanted) = before.holders[who as usize].attempt {
                    state.holders[who as usize].attempt = Attempt::ReadFloor(wanted, before.floor);
                }
            }
            Step::Insert(who) => self.insert(&mut state, who),
            Step::Commit(who) => self.commit(&mut state, who),
            Step::RollBack(who) => state.holders[who as usize].attempt = Attempt::None,
            Step::Forge(resource) => {
                state.strangers -= 1;
                write_row(&mut state, resource, FORGED);
            }
            Step::Ask => {
                state.removals -= 1;
                let mut below = u8::MAX;
                if self.rules.has(Rule::HeldAreSpared) {
                    below = before.lowest_held().unwrap_or(below);
                }
                if self.rules.has(Rule::OutliersAreSpared) {
                    // A forged token is above all assigned epochs, so the removal keeps its row.
                    below = below.min(FORGED);
                }
                state.used = [false; 2];
                state.removal = Removal::Asked(below);
            }
            Step::LockFloor => {
                if let Removal::Asked(below) = before.removal {
                    state.removal = Removal::LockedFloor(below);
                }
            }
            Step::Remove(resource) => {
                let has_floor = matches!(before.removal, Removal::LockedFloor(_));
                state.removal = Removal::Removed(resource, has_floor);
            }
            Step::FallBehind => state.standby = Some((before.rows, before.floor)),
            Step::FailOver => fail_over(&mut state),
            Step::CatchUp => {
                state.changed = false;
                for row in state.rows.iter_mut().flatten() {
                    *row = MOVE.max(*row);
                }
                if self.rules.has(Rule::FloorMovesUp) {
                    state.floor = before.floor.max(MOVE);
                }
            }
            Step::RollBackRemoval => state.removal = Removal::None,
            Step::CommitRemoval => {
                if let Removal::Removed(resource, _) = before.removal {
                    let max_token = state.rows[resource as usize].take().unwrap_or_default();
                    state.removed[resource as usize] = true;
                    if self.rules.has(Rule::Floor) {
                        let goes_up = self.rules.has(Rule::FloorGoesUp);
                        state.floor = if goes_up {
                            before.floor.max(max_token)
                        } else {
                            max_token
                        };
                    }
                    state.removal = Removal::None;
                }
            }
        }
        state
    }

    fn update(&self, state: &mut State, who: Who) {
        let holder = state.holders[who as usize];
        let Attempt::Sent(wanted) = holder.attempt else {
            return;
        };
        match state.row(holder.resource) {
            None => state.holders[who as usize].attempt = Attempt::NoRow(wanted),
            Some(max_token) if max_token < holder.token => {
                state.holders[who as usize].attempt = Attempt::Has(wanted, false);
            }
            Some(_) => refuse(state, who),
        }
    }

    fn insert(&self, state: &mut State, who: Who) {
        let holder = state.holders[who as usize];
        let Attempt::ReadFloor(wanted, floor) = holder.attempt else {
            return;
        };
        let rule = match wanted {
            Use::Write => Rule::AdmittedAboveFloor,
            Use::Raise => Rule::RaisedAboveFloor,
        };
        let below = floor >= holder.token && self.rules.has(rule);
        let superseded = state
            .row(holder.resource)
            .is_some_and(|max| max >= holder.token);
        if below || superseded {
            state.refused_by_floor |= below;
            return refuse(state, who);
        }
        state.holders[who as usize].attempt = Attempt::Has(wanted, true);
    }

    fn commit(&self, state: &mut State, who: Who) {
        let holder = state.holders[who as usize];
        let Attempt::Has(wanted, _) = holder.attempt else {
            return;
        };
        let token = holder.token;
        let max_token = match wanted {
            Use::Write => token,
            Use::Raise => token - 1,
        };
        if wanted == Use::Write {
            state.stale_wrote |= token <= state.highest_stale[holder.resource as usize];
            let removed = state.removed.contains(&true);
            state.written_after_removal |= removed && holder.lease == Lease::Held;
            state.written_after_failover |= state.failed_over;
        }
        // A raise does not lower the token of a row.
        let max_token = max_token.max(state.row(holder.resource).unwrap_or_default());
        write_row(state, holder.resource, max_token);
        state.holders[who as usize].attempt = Attempt::None;
        state.holders[who as usize].outcome = Some(Outcome::Done);
    }

    fn is_locked(&self, state: &State, resource: Resource) -> bool {
        state.is_locked(resource) || self.one_writer && state.is_written_to()
    }

    fn floor_can_be_read(&self, state: &State) -> bool {
        !(state.floor_is_locked() && self.rules.has(Rule::FloorIsLocked)
            || self.one_writer && state.is_written_to())
    }
}

/// Promotes the standby. The failover ends all open transactions. `highest_stale` does not change,
/// because stale tokens must remain stale.
fn fail_over(state: &mut State) {
    state.failovers -= 1;
    (state.rows, state.floor) = state.standby.take().expect("a standby lags");
    state.changed = true;
    state.failed_over = true;
    state.removal = Removal::None;
    for holder in &mut state.holders {
        if matches!(holder.attempt, Attempt::ReadFloor(..) | Attempt::Has(..)) {
            holder.attempt = Attempt::None;
        }
    }
}

fn write_row(state: &mut State, resource: Resource, max_token: u8) {
    let place = resource as usize;
    state.rows[place] = Some(max_token);
    state.used[place] = true;
    state.highest_stale[place] = state.highest_stale[place].max(max_token);
}

fn refuse(state: &mut State, who: Who) {
    let holder = &mut state.holders[who as usize];
    holder.attempt = Attempt::None;
    holder.outcome = Some(Outcome::Refused);
    let is_alive = state.highest_stale[holder.resource as usize] < holder.token;
    // A failover makes all earlier tokens stale.
    let is_moved = state.failed_over && holder.token <= MOVE;
    state.refused_for_nothing |= is_alive && holder.lease == Lease::Held && !is_moved;
}
