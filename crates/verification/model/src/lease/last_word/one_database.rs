//! Leases in the database of the fence. A grant and its announcement are one transaction, and the
//! row of the fence is the token counter.

use super::{
    LastWord,
    request::{server_of, take},
    rules::Promise,
    state::{Kind, Of, State},
};

impl LastWord {
    /// Executes a whole request.
    pub(super) fn run_in_database(&self, state: &mut State, of: Of) {
        let request = take(state, of);
        let row = &state.database;
        let (max_token, announced) = (row.max_token, (row.announced, row.lease));
        // A higher token has been used since the announcement.
        let has_ended = row.announced > 0 && row.lease.is_none();
        let next = row.seen() + 1;
        let lease = &mut server_of(state, &request).lease;
        let held = lease.filter(|(id, _)| *id == request.id);
        let token = match (request.kind, held) {
            (Kind::Release, _) => {
                lease.take_if(|(id, _)| *id == request.id);
                return;
            }
            (Kind::Acquire, None) if lease.is_some() => return,
            (Kind::Acquire, None) => {
                state.grants += 1;
                next
            }
            // A token that is used up is not valid for a further write.
            (Kind::Acquire, Some((_, token))) if token <= max_token => next,
            (Kind::Acquire, Some((_, token))) => token,
            (Kind::Renew { .. }, None) => return Self::is_lost(state, of),
            (Kind::Renew { new_token }, Some((id, token))) => {
                let was_last = announced == (token, Some(id));
                if max_token + u8::from(has_ended) > token || new_token && !was_last {
                    *lease = None;
                    if Self::no_fault(state) && self.bounds.abandoned == 0 {
                        state.past.breaks(Promise::Stands);
                    }
                    return Self::is_lost(state, of);
                }
                if new_token { next } else { token }
            }
        };
        if token == next {
            server_of(state, &request).lease = Some((request.id, token));
            state.database.grant(token, request.id, self.rules);
            state.disk = state.database.clone();
        }
        self.answer(state, of, &request, token);
    }
}
