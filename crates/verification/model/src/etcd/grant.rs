//! A request for a lease, and a renewal with another TTL.

use super::{
    Of, Promise, Rule,
    bounds::{Etcd, Kind},
    judge::{Judgement, Status, judge},
    server::{Found, Incarnation, Row, Seen, Token, Write},
    state::{Needs, Stage, State},
};

impl Etcd {
    /// Sends the transaction that writes the key, and returns the data that it reads. Returns
    /// `None` if the etcd lease of the request no longer exists.
    pub(super) fn write(&self, state: &mut State, of: Of) -> Option<Seen> {
        let Of(place, request) = of;
        let Stage::Ready(replaces) = state.requests[place].stage else {
            return None;
        };
        let own = self.etcd_lease(place);
        let write = Write {
            row: state.issuers[request.issuer].rows[request.resource],
            replaces,
            lease: request.lease,
            etcd_lease: own,
        };
        if let Some(found) = replaces.filter(|found| found.etcd_lease != own) {
            state.requests[place].found = Some(found.etcd_lease);
            if self.rules.has(Rule::ReleaseUnmoved) {
                state.issuers[request.issuer].etcd_leases[usize::from(request.lease)] = None;
            }
        }
        state.requests[place].sent.write = Some(write);
        state
            .etcd
            .write(request.resource, &write, self.compares_incarnation())
    }

    /// Whether the next transaction of a request only reads. This applies to renewals with the same
    /// TTL, to the first transaction of a renewal with another TTL, and after a transaction that
    /// may have written the key.
    pub(super) fn only_reads(&self, state: &State, of: Of) -> bool {
        let Of(place, request) = of;
        let progress = &state.requests[place];
        let Stage::Ready(replaces) = progress.stage else {
            return true;
        };
        let own = Some(self.etcd_lease(place));
        let is_own = replaces.map(|found| found.etcd_lease) == own;
        let has_written = progress.has_written && self.rules.has(Rule::EtcdLeaseOnce);
        let is_first_of_move = request.kind == Kind::Move && replaces.is_none();
        is_first_of_move || has_written && !is_own
    }

    pub(super) fn transact(&self, state: &mut State, of: Of) {
        let Of(place, request) = of;
        let reads = self.only_reads(state, of);
        let seen = match reads {
            true => Some(state.etcd.read(request.resource)),
            false => self.write(state, of),
        };
        let Some(seen) = seen else {
            state.requests[place].stage = Stage::Over;
            return;
        };
        let renews = request.kind == Kind::Renew;
        let is_checked = match renews {
            true => !self.rules.has(Rule::RenewalChecked),
            false => state.requests[place].is_checked || !self.rules.has(Rule::Checked),
        };
        match is_checked {
            true => self.decide(state, of, &seen, None),
            false => state.requests[place].stage = Stage::Answered(seen),
        }
    }

    /// Decides the next stage from the answer of a transaction.
    pub(super) fn decide(&self, state: &mut State, of: Of, seen: &Seen, status: Option<Status>) {
        let Of(place, request) = of;
        let judged = judge(self.rules, seen, status);
        let key = seen.key.filter(|key| key.lease == request.lease);
        if request.kind == Kind::Renew {
            self.decide_renewal(state, of, judged, key);
            return;
        }
        let row = match judged {
            Judgement::Usable(row) => row,
            Judgement::NeedsIncarnation(needs) => {
                state.requests[place].stage = Stage::NeedsIncarnation(needs);
                return;
            }
            Judgement::NeedsEpoch(needs) => {
                state.requests[place].stage = Stage::NeedsEpoch(needs);
                return;
            }
        };
        state.issuers[request.issuer].rows[request.resource] = Some(row);
        let own = self.etcd_lease(place);
        let progress = &mut state.requests[place];
        let may_write = !progress.has_written || !self.rules.has(Rule::EtcdLeaseOnce);
        let Some(key) = key else {
            let is_free = seen.key.is_none() && request.kind == Kind::Acquire;
            progress.stage = match is_free && may_write {
                true => Stage::Ready(None),
                false => Stage::Over,
            };
            return;
        };
        let counts = key.counts(&row);
        let is_own = key.etcd_lease == own;
        progress.has_written |= is_own;
        if is_own && (counts || !self.rules.has(Rule::CachedRow)) {
            match progress.found.filter(|_| self.rules.has(Rule::MoveRevokes)) {
                Some(old) => {
                    let token = key.token;
                    progress.stage = Stage::Moved { old, token };
                }
                None => self.answer(state, of, key.token),
            }
        } else if counts && !self.rules.has(Rule::RepeatMoves) {
            self.answer(state, of, key.token);
        } else if (is_own || may_write) && (counts || request.kind == Kind::Acquire) {
            progress.stage = Stage::Ready(Some(Found {
                written: key.written,
                etcd_lease: key.etcd_lease,
                token: Some(key.token).filter(|_| counts),
            }));
        } else {
            progress.stage = Stage::Over;
        }
    }

    /// Answers a request for a lease or its renewal.
    pub(super) fn answer(&self, state: &mut State, of: Of, token: Token) {
        let Of(place, request) = of;
        let before = state.requests[place].before;
        let others = self.requests.iter().zip(&state.requests);
        let mut others = others.filter(|(other, _)| {
            other.resource == request.resource && other.lease != request.lease
        });
        let is_repeated = others.any(|(_, progress)| progress.token == Some(token));
        let renews = request.kind != Kind::Acquire;
        if is_repeated {
            state.fail(Promise::Distinct);
        } else if renews && (token <= before.others || before.released) {
            state.fail(Promise::Renewed);
        } else if token <= before.others || token < before.own {
            state.fail(Promise::Later);
        }
        let progress = &mut state.requests[place];
        (progress.stage, progress.token) = (Stage::Done, Some(token));
        let lease = usize::from(request.lease);
        state.released[lease] &= renews;
        let granted = match request.kind {
            Kind::Renew => progress.found,
            _ => Some(self.etcd_lease(place)),
        };
        let keeps_old = !self.rules.has(Rule::ReleaseUnmoved);
        let cached = &mut state.issuers[request.issuer].etcd_leases[lease];
        if self.is_of_use(&request) && !(keeps_old && cached.is_some()) {
            *cached = granted;
        }
    }

    pub(super) fn write_incarnation(&self, state: &mut State, Of(place, _): Of) -> Option<()> {
        let Stage::NeedsIncarnation(needs) = state.requests[place].stage else {
            return None;
        };
        let incarnation = Incarnation {
            id: state.incarnations + 1,
            lead: needs.lead,
        };
        let instead_of = Some(needs.incarnation).filter(|id| *id > 0);
        state.requests[place].sent.incarnation = Some((instead_of, incarnation));
        let is_written = state.etcd.write_incarnation(instead_of, incarnation);
        if is_written {
            state.incarnations = incarnation.id;
            state.since_restore.incarnation = true;
        }
        let next = Needs {
            incarnation: incarnation.id,
            lead: 0,
            ..needs
        };
        state.requests[place].stage = match is_written {
            true => Stage::NeedsEpoch(next),
            false => Stage::Ready(None),
        };
        Some(())
    }

    pub(super) fn begin_epoch(&self, state: &mut State, Of(place, request): Of) -> Option<()> {
        let Stage::HasEpoch(needs) = state.requests[place].stage else {
            return None;
        };
        let partition = request.resource;
        let instead_of = match self.rules.has(Rule::EpochOnRow) {
            true => needs.row,
            false => state.etcd.rows[partition].map_or(0, |row| row.written),
        };
        let row = Row {
            incarnation: needs.incarnation,
            lead: needs.lead,
            epoch: needs.epoch,
            written: 0,
        };
        state.requests[place].sent.row = Some((instead_of, row));
        let compares_incarnation = self.rules.has(Rule::OneIncarnation);
        let begun = state
            .etcd
            .write_row(partition, instead_of, row, compares_incarnation);
        if let Some(row) = begun {
            state.since_restore.rows[partition] = true;
            state.issuers[request.issuer].rows[partition] = Some(row);
        }
        state.requests[place].stage = Stage::Ready(None);
        Some(())
    }
}
