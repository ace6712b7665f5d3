//! The reads of holders, and the writes that are based on them.

use super::{
    LastWord, Promise, Step,
    state::{Held, Holder, State},
};

impl LastWord {
    pub(super) fn works(&self, state: &State, holder: usize, steps: &mut Vec<Step>) {
        let of = super::Of(holder);
        let Holder::Holds(held) = state.holders[holder] else {
            return;
        };
        if held.used {
            return;
        }
        if held.read.is_none() {
            if !held.in_doubt {
                steps.push(Step::Reads(of));
            }
        } else {
            steps.push(Step::Writes(of));
            if state.delays < self.delayed {
                steps.push(Step::WriteIsDelayed(of));
            }
        }
    }

    pub(super) fn work(&self, state: &mut State, step: Step) {
        let (Step::Reads(of) | Step::Writes(of) | Step::WriteIsDelayed(of)) = step else {
            unreachable!("no other step reads or writes");
        };
        let Holder::Holds(mut held) = state.holders[of.0] else {
            unreachable!("the holder has a lease");
        };
        match step {
            Step::Reads(_) => held.read = Some(state.database.value),
            Step::Writes(_) => {
                if self.write(state, held) {
                    held.read = Some(state.database.value);
                    held.used = true;
                } else {
                    let server = &state.servers[usize::from(state.master)];
                    // If the holder may have sent two requests, the lease may have another token.
                    let asked = self.new_tokens + self.abandoned > 0;
                    let stands = server.lease.is_some_and(|(id, token)| {
                        id == held.id && (token == held.token || !asked)
                    });
                    if stands && Self::no_fault(state) {
                        state.past.breaks(Promise::Stands);
                    }
                    // The holder may take a new token, and must then read the data again.
                    held.read = None;
                    held.used = true;
                }
            }
            _ => {
                state.delays += 1;
                state.delayed = Some(held);
                held.read = None;
                held.used = true;
                held.in_doubt = true;
            }
        }
        state.holders[of.0] = Holder::Holds(held);
    }

    pub(super) fn arrive(&self, state: &mut State) {
        let held = state.delayed.take().expect("a write is delayed");
        self.write(state, held);
    }

    pub(super) fn forge(&self, state: &mut State, token: u8, reusable: bool) {
        state.forged += 1;
        state.past.writes += 1;
        let value = state.past.writes;
        state.database.write(token, reusable, value, self.rules);
        state.disk = state.database.clone();
    }

    /// Writes under a granted token, based on the read of its holder.
    fn write(&self, state: &mut State, held: Held) -> bool {
        let before = state.database.value;
        let value = state.past.writes + 1;
        if !state.database.write(held.token, false, value, self.rules) {
            return false;
        }
        state.disk = state.database.clone();
        let past = &mut state.past;
        past.writes = value;
        past.wrote |= 1 << held.id;
        past.wrote_after_forgery |= state.forged > 0;
        let newer = |(token, id): &(u8, u8)| *token > held.token && *id != held.id;
        if held.read != Some(before) {
            past.breaks(Promise::NoLostUpdate);
        } else if past.answered.iter().any(newer) {
            past.breaks(Promise::OlderIsStale);
        }
        true
    }
}
