//! The effects of the steps.

use super::{
    Of, Rule, Step,
    bounds::{Etcd, Kind, Request},
    judge::Status,
    server::PARTITIONS,
    state::{Before, Sent, SinceRestore, Stage, State},
};

/// The amount by which the lead grows while many leases are granted and released.
const GROWTH: i8 = 30;

impl Etcd {
    /// Returns the state after a step.
    pub(super) fn step(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        match step {
            Step::LeaseGrant(Of(place, request)) => {
                next.requests[place].before = self.before(state, &request);
                next.requests[place].stage = Stage::Ready(None);
                next.requests[place].sent.lease_grant = true;
                next.etcd.grant_lease(self.etcd_lease(place));
            }
            Step::Txn(of) => self.transact(&mut next, of),
            Step::TxnWithoutAnswer(of @ Of(place, _)) => {
                next.spent.copies += 1;
                next.requests[place].has_written = true;
                self.write(&mut next, of);
            }
            Step::Status(of @ Of(place, _)) => {
                let Stage::Answered(seen) = state.requests[place].stage else {
                    return None;
                };
                let status = Status::of(&state.etcd);
                self.decide(&mut next, of, &seen, Some(status));
            }
            Step::StatusAhead(Of(place, _)) => next.requests[place].is_checked = true,
            Step::WriteIncarnation(of) => self.write_incarnation(&mut next, of)?,
            Step::TakeEpoch(Of(place, _)) => {
                let Stage::NeedsEpoch(needs) = state.requests[place].stage else {
                    return None;
                };
                let mut taken = needs;
                if self.rules.has(Rule::NewEpoch) {
                    next.epoch += 1;
                    taken.epoch = next.epoch;
                }
                next.requests[place].stage = Stage::HasEpoch(taken);
            }
            Step::BeginEpoch(of) => self.begin_epoch(&mut next, of)?,
            Step::RevokeOld(of @ Of(place, _)) => {
                let Stage::Moved { old, token } = state.requests[place].stage else {
                    return None;
                };
                self.revoke(&mut next, place, old);
                self.answer(&mut next, of, token);
            }
            Step::ReadKey(of) => self.read_key(&mut next, of),
            Step::KeepAlive(of) => self.keep_alive(&mut next, of)?,
            Step::Revoke(of) => self.release(&mut next, of)?,
            Step::GiveUp(of) => self.give_up(&mut next, of),
            Step::LeaseGrantAgain(Of(place, _)) => {
                next.spent.copies += 1;
                next.etcd.grant_lease(self.etcd_lease(place));
            }
            Step::TxnAgain(Of(place, request)) => {
                next.spent.copies += 1;
                let write = state.requests[place].sent.write?;
                next.etcd
                    .write(request.resource, &write, self.compares_incarnation());
            }
            Step::WriteIncarnationAgain(Of(place, _)) => {
                next.spent.copies += 1;
                next.spent.late_writes += 1;
                let (instead_of, incarnation) = state.requests[place].sent.incarnation?;
                next.since_restore.incarnation |=
                    next.etcd.write_incarnation(instead_of, incarnation);
            }
            Step::BeginEpochAgain(Of(place, request)) => {
                next.spent.copies += 1;
                next.spent.late_writes += 1;
                let (instead_of, row) = state.requests[place].sent.row?;
                let compares_incarnation = self.rules.has(Rule::OneIncarnation);
                let begun =
                    next.etcd
                        .write_row(request.resource, instead_of, row, compares_incarnation);
                next.since_restore.rows[request.resource] |= begun.is_some();
            }
            Step::RevokeAgain(Of(place, _)) => {
                next.spent.copies += 1;
                let sent = state.requests[place].sent.revoke?;
                self.revoke(&mut next, place, sent);
            }
            Step::Expire(etcd_lease) => {
                next.etcd.end_lease(etcd_lease);
            }
            Step::Snapshot => {
                next.spent.snapshots += 1;
                next.saved = Some(next.etcd);
            }
            Step::Restore => {
                next.spent.restores += 1;
                next.etcd = next.saved?.restored();
                next.since_restore = SinceRestore {
                    incarnation: false,
                    rows: [false; PARTITIONS],
                };
            }
            Step::LeadGrows => {
                next.spent.grown += 1;
                next.etcd.lead += GROWTH;
            }
        }
        self.forget(&mut next);
        Some(next)
    }

    /// Drops data that has no further effect, so that states with the same continuations are equal.
    fn forget(&self, state: &mut State) {
        let has_copies = self.has_copies(state);
        if !has_copies {
            state.spent.late_writes = 0;
        }
        if state.spent.restores == self.most.restores {
            state.saved = None;
        }
        for (place, request) in self.requests.iter().enumerate() {
            let progress = &mut state.requests[place];
            if !has_copies {
                progress.sent = Sent::default();
            }
            if !progress.stage.is_under_way() && progress.stage != Stage::New {
                (progress.found, progress.is_checked) = (None, false);
                progress.has_written = false;
                if request.kind != Kind::Release || !has_copies {
                    progress.before = Before::default();
                }
            }
        }
    }

    /// Returns the id of the etcd lease of a request.
    pub(super) fn etcd_lease(&self, place: usize) -> u8 {
        match self.rules.has(Rule::EtcdLeaseOfAttempt) {
            true => u8::try_from(place).expect("there are few requests"),
            false => self.requests[place].lease,
        }
    }

    /// Whether the transaction that writes the key of a lease compares the incarnation.
    pub(super) fn compares_incarnation(&self) -> bool {
        self.rules.has(Rule::OneIncarnation)
            && self.rules.has(Rule::RowNamesIncarnation)
            && self.rules.has(Rule::CachedRow)
    }

    /// Returns the highest tokens of a resource that were returned to clients until now.
    pub(super) fn before(&self, state: &State, request: &Request) -> Before {
        let mut before = Before {
            released: state.released[usize::from(request.lease)],
            ..Before::default()
        };
        for (other, progress) in self.requests.iter().zip(&state.requests) {
            if other.resource != request.resource {
                continue;
            }
            let highest = match other.lease == request.lease {
                true => &mut before.own,
                false => &mut before.others,
            };
            *highest = (*highest).max(progress.token.unwrap_or_default());
        }
        before
    }
}
