//! What each step does.

use super::{
    Etcd,
    bounds::{Kind, Request},
    judge::{Judgement, Status, judge},
    rules::{Promise, Rule, Rules},
    server::{Compares, Found, Key, Life, PARTITIONS, Row, Seen, Token, Write},
    state::{Before, Needs, Sent, SinceRestore, Stage, State},
    step::{Of, Step},
};

/// How far the lead grows while many leases come and go.
const GROWTH: i8 = 30;

impl Etcd {
    /// The state after a step.
    pub(super) fn step(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        match step {
            Step::LeaseGrant(Of(place, request)) => {
                next.requests[place].before = self.before(state, &request);
                next.requests[place].stage = Stage::Ready(None);
                next.requests[place].sent.lease_grant = true;
                next.etcd.grant_lease(self.etcd_lease(place));
            }
            Step::Txn(Of(place, request)) => self.transact(&mut next, place, &request),
            Step::TxnWithoutAnswer(Of(place, request)) => {
                next.spent.copies += 1;
                next.requests[place].has_written = true;
                self.write(&mut next, place, &request);
            }
            Step::Status(Of(place, request)) => {
                let Stage::Answered(seen) = state.requests[place].stage else {
                    return None;
                };
                let status = Status::of(&state.etcd);
                self.decide(&mut next, place, &request, &seen, Some(status));
            }
            Step::StatusAhead(Of(place, _)) => next.requests[place].is_checked = true,
            Step::WriteLife(of) => self.write_life(&mut next, of)?,
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
            Step::RevokeOld(Of(place, request)) => {
                let Stage::Moved { old, token } = state.requests[place].stage else {
                    return None;
                };
                self.revoke(&mut next, place, old);
                self.answer(&mut next, place, &request, token);
            }
            Step::Look(Of(place, request)) => self.look(&mut next, place, &request),
            Step::KeepAlive(Of(place, request)) => self.keep_alive(&mut next, place, &request)?,
            Step::Revoke(Of(place, request)) => self.release(&mut next, place, &request)?,
            Step::GiveUp(Of(place, request)) => self.give_up(&mut next, place, &request),
            Step::LeaseGrantAgain(Of(place, _)) => {
                next.spent.copies += 1;
                next.etcd.grant_lease(self.etcd_lease(place));
            }
            Step::TxnAgain(Of(place, request)) => {
                next.spent.copies += 1;
                let write = state.requests[place].sent.write?;
                next.etcd.write(request.resource, &write, self.compares());
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
                    life: false,
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

    /// Drops what has no effect any more, so that states are equal that go on alike.
    fn forget(&self, state: &mut State) {
        let has_copies = self.has_copies(state);
        if state.spent.restores == self.bounds.most.restores {
            state.saved = None;
        }
        for (place, request) in self.bounds.requests.iter().enumerate() {
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

    /// The id of the etcd lease of a request.
    pub(super) fn etcd_lease(&self, place: usize) -> u8 {
        match self.rules.has(Rule::EtcdLeaseOfAttempt) {
            true => u8::try_from(place).expect("requests are few"),
            false => self.bounds.requests[place].lease,
        }
    }

    fn compares(&self) -> Compares {
        let rules = self.rules;
        Compares {
            revision: rules.has(Rule::RowRevision),
            life: rules.has(Rule::OneLife)
                && rules.has(Rule::RowNamesLife)
                && rules.has(Rule::CachedRow),
        }
    }

    /// What has been answered up to now about a resource.
    fn before(&self, state: &State, request: &Request) -> Before {
        let mut before = Before {
            released: state.released[usize::from(request.lease)],
            ..Before::default()
        };
        for (other, progress) in self.bounds.requests.iter().zip(&state.requests) {
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

    /// Sends the transaction that writes the key, and returns what it reads. `None` if its etcd lease has ended.
    fn write(&self, state: &mut State, place: usize, request: &Request) -> Option<Seen> {
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
        state.etcd.write(request.resource, &write, self.compares())
    }

    /// Whether the next transaction of a request writes nothing: that of a renewal with the same ttl, the first one of a renewal
    /// with another ttl, and one after a transaction that may have written the key.
    pub(super) fn only_reads(&self, state: &State, place: usize, request: &Request) -> bool {
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

    fn transact(&self, state: &mut State, place: usize, request: &Request) {
        let reads = self.only_reads(state, place, request);
        let seen = match reads {
            true => Some(state.etcd.read(request.resource)),
            false => self.write(state, place, request),
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
            true => self.decide(state, place, request, &seen, None),
            false => state.requests[place].stage = Stage::Answered(seen),
        }
    }

    /// Decides what follows from the answer of a transaction.
    fn decide(
        &self,
        state: &mut State,
        place: usize,
        request: &Request,
        seen: &Seen,
        status: Option<Status>,
    ) {
        let judged = judge(self.rules, seen, status);
        let key = seen.key.filter(|key| key.lease == request.lease);
        if request.kind == Kind::Renew {
            self.decide_renewal(state, place, request, judged, key);
            return;
        }
        let row = match judged {
            Judgement::Usable(row) => row,
            Judgement::NeedsLife(needs) => {
                state.requests[place].stage = Stage::NeedsLife(needs);
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
                None => self.answer(state, place, request, key.token),
            }
        } else if counts && !self.rules.has(Rule::RepeatMoves) {
            self.answer(state, place, request, key.token);
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

    fn decide_renewal(
        &self,
        state: &mut State,
        place: usize,
        request: &Request,
        judged: Judgement,
        key: Option<Key>,
    ) {
        let counts = |key: &Key| match judged {
            Judgement::Usable(row) => key.counts(&row) || !self.rules.has(Rule::RenewalCounts),
            Judgement::NeedsEpoch(_) => !self.rules.has(Rule::RenewalCounts),
            Judgement::NeedsLife(_) => false,
        };
        let found = state.requests[place].found;
        match key.filter(counts) {
            Some(key) if found == Some(key.etcd_lease) => {
                self.answer(state, place, request, key.token);
            }
            Some(key) => state.requests[place].stage = Stage::Found(key.etcd_lease),
            None => state.requests[place].stage = Stage::Over,
        }
    }

    /// Answers a request for a lease or its renewal.
    fn answer(&self, state: &mut State, place: usize, request: &Request, token: Token) {
        let before = state.requests[place].before;
        let others = self.bounds.requests.iter().zip(&state.requests);
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
        if self.bounds.is_of_use(request) && !(keeps_old && cached.is_some()) {
            *cached = granted;
        }
    }

    fn write_life(&self, state: &mut State, Of(place, _): Of) -> Option<()> {
        let Stage::NeedsLife(needs) = state.requests[place].stage else {
            return None;
        };
        let life = Life {
            id: state.lives + 1,
            lead: needs.lead,
        };
        let instead_of = Some(needs.life).filter(|id| *id > 0);
        let is_written = state.etcd.write_life(instead_of, life);
        if is_written {
            state.lives = life.id;
            state.since_restore.life = true;
        }
        let next = Needs {
            life: life.id,
            lead: 0,
            ..needs
        };
        state.requests[place].stage = match is_written {
            true => Stage::NeedsEpoch(next),
            false => Stage::Ready(None),
        };
        Some(())
    }

    fn begin_epoch(&self, state: &mut State, Of(place, request): Of) -> Option<()> {
        let Stage::HasEpoch(needs) = state.requests[place].stage else {
            return None;
        };
        let partition = request.resource;
        let instead_of = match self.rules.has(Rule::EpochOnRow) {
            true => needs.row,
            false => state.etcd.rows[partition].map_or(0, |row| row.written),
        };
        let row = Row {
            life: needs.life,
            lead: needs.lead,
            epoch: needs.epoch,
            written: 0,
        };
        let compares_life = self.rules.has(Rule::OneLife);
        let begun = state
            .etcd
            .write_row(partition, instead_of, row, compares_life);
        if let Some(row) = begun {
            state.since_restore.rows[partition] = true;
            state.issuers[request.issuer].rows[partition] = Some(row);
        }
        state.requests[place].stage = Stage::Ready(None);
        Some(())
    }

    /// Reads the key for a renewal or a release that does not know the etcd lease.
    fn look(&self, state: &mut State, place: usize, request: &Request) {
        if state.requests[place].stage == Stage::New {
            state.requests[place].before = self.before(state, request);
        }
        let key = state.etcd.keys[request.resource];
        let key = key.filter(|key| key.lease == request.lease);
        state.requests[place].stage = match key {
            Some(key) => Stage::Found(key.etcd_lease),
            None => Stage::Over,
        };
    }

    fn keep_alive(&self, state: &mut State, place: usize, request: &Request) -> Option<()> {
        let lease = usize::from(request.lease);
        let cached = state.issuers[request.issuer].etcd_leases[lease];
        let (etcd_lease, is_cached) = match state.requests[place].stage {
            Stage::Found(found) => (found, false),
            _ => (cached?, true),
        };
        if is_cached {
            state.requests[place].before = self.before(state, request);
        }
        if state.etcd.has_lease(etcd_lease) {
            state.requests[place].found = Some(etcd_lease);
            state.requests[place].stage = Stage::Alive(etcd_lease);
            if !self.rules.has(Rule::RenewalReads) {
                let own = state.requests[place].before.own;
                self.answer(state, place, request, own);
            }
        } else if is_cached {
            state.issuers[request.issuer].etcd_leases[lease] = None;
            state.requests[place].stage = Stage::Looks;
        } else {
            state.requests[place].stage = Stage::Over;
        }
        Some(())
    }

    fn release(&self, state: &mut State, place: usize, request: &Request) -> Option<()> {
        let lease = usize::from(request.lease);
        let cached = state.issuers[request.issuer].etcd_leases[lease].take();
        let etcd_lease = match state.requests[place].stage {
            Stage::Found(found) => found,
            _ => {
                state.requests[place].before = self.before(state, request);
                cached?
            }
        };
        let existed = self.revoke(state, place, etcd_lease);
        if !existed && self.rules.has(Rule::NotFoundLooks) {
            state.requests[place].stage = Stage::Looks;
            return Some(());
        }
        let key = state.etcd.keys[request.resource];
        if key.is_some_and(|key| self.was_to_be_released(state, request, &key)) {
            state.fail(Promise::Released);
        }
        state.released[lease] = true;
        state.requests[place].stage = Stage::Done;
        Some(())
    }

    /// Whether a released lease has left this key. A request for another ttl that has had no answer may have moved it by
    /// another issuer, which the one that releases it cannot know.
    fn was_to_be_released(&self, state: &State, released: &Request, key: &Key) -> bool {
        let mut requests = self.bounds.requests.iter().enumerate();
        let is_unknown = requests.any(|(place, request)| {
            request.issuer != released.issuer
                && state.requests[place].stage == Stage::Over
                && self.etcd_lease(place) == key.etcd_lease
        });
        key.lease == released.lease && !is_unknown
    }

    /// Ends a request that is under way. A lease that a request for another ttl has moved goes on, and so does one that was
    /// granted to an earlier request.
    fn give_up(&self, state: &mut State, place: usize, request: &Request) {
        let has_moved = state.requests[place].found.is_some();
        let leaves = request.kind == Kind::Move || has_moved && self.rules.has(Rule::GiveUpOwn);
        state.requests[place].stage = Stage::Over;
        if !leaves {
            self.revoke(state, place, self.etcd_lease(place));
        }
    }

    /// Revokes an etcd lease. Returns whether it existed.
    fn revoke(&self, state: &mut State, place: usize, etcd_lease: u8) -> bool {
        let resource = self.bounds.requests[place].resource;
        let now = judge(
            Rules::default(),
            &state.etcd.read(resource),
            Some(Status::of(&state.etcd)),
        );
        let (existed, ended) = state.etcd.end_lease(etcd_lease);
        state.requests[place].sent.revoke = Some(etcd_lease);
        if let (Some(key), Judgement::Usable(row)) = (ended, now)
            && key.counts(&row)
        {
            let releases = self.bounds.requests[place].kind == Kind::Release;
            let is_own = releases && state.requests[place].before.own == key.token;
            let mut requests = self.bounds.requests.iter().zip(&state.requests);
            let stands = requests.any(|(other, progress)| {
                other.lease == key.lease && progress.token == Some(key.token)
            });
            if stands && !is_own && !state.released[usize::from(key.lease)] {
                state.fail(Promise::Stands);
            }
        }
        existed
    }
}
