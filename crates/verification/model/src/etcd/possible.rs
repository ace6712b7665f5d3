//! The possible steps.

use super::{
    Of, Rule, Step,
    bounds::{Etcd, Kind},
    judge::{Judgement, Status, judge},
    server::PARTITIONS,
    state::{Stage, State},
};

impl Etcd {
    pub(super) fn request_steps(&self, state: &State, of: Of, steps: &mut Vec<Step>) {
        let Of(place, request) = of;
        let progress = &state.requests[place];
        let issuer = &state.issuers[request.issuer];
        let is_cached = issuer.etcd_leases[usize::from(request.lease)].is_some();
        let acquires = matches!(request.kind, Kind::Acquire | Kind::Move);
        match progress.stage {
            Stage::New if !self.may_begin(state, place) => {}
            Stage::New => steps.push(match request.kind {
                Kind::Acquire | Kind::Move => Step::LeaseGrant(of),
                Kind::Renew if is_cached => Step::KeepAlive(of),
                Kind::Release if is_cached => Step::Revoke(of),
                Kind::Renew | Kind::Release => Step::ReadKey(of),
            }),
            Stage::Ready(_) => {
                let is_ahead = !self.rules.has(Rule::StatusAfter) && !progress.is_checked;
                if is_ahead {
                    let seen = state.etcd.read(request.resource);
                    let judged = judge(self.rules, &seen, Some(Status::of(&state.etcd)));
                    if matches!(judged, Judgement::Usable(_)) {
                        steps.push(Step::StatusAhead(of));
                    }
                } else {
                    steps.push(Step::Txn(of));
                }
                let writes = !self.only_reads(state, of);
                if writes && self.has_copies(state) {
                    steps.push(Step::TxnWithoutAnswer(of));
                }
            }
            Stage::Answered(_) => steps.push(Step::Status(of)),
            Stage::NeedsIncarnation(_) => steps.push(Step::WriteIncarnation(of)),
            Stage::NeedsEpoch(_) => steps.push(Step::TakeEpoch(of)),
            Stage::HasEpoch(_) => steps.push(Step::BeginEpoch(of)),
            Stage::Moved { .. } => steps.push(Step::RevokeOld(of)),
            Stage::Found(_) => steps.push(match request.kind {
                Kind::Release => Step::Revoke(of),
                _ => Step::KeepAlive(of),
            }),
            Stage::Alive(_) => steps.push(Step::Txn(of)),
            Stage::ReadsKey => steps.push(Step::ReadKey(of)),
            Stage::Done | Stage::Over => {}
        }
        if acquires && self.gives_up && progress.stage.is_under_way() {
            steps.push(Step::GiveUp(of));
        }
    }

    /// Lists the calls of a request that may arrive a second time.
    pub(super) fn late_copies(&self, state: &State, of: Of, steps: &mut Vec<Step>) {
        if !self.has_copies(state) {
            return;
        }
        let sent = &state.requests[of.0].sent;
        if sent.lease_grant && !state.etcd.has_lease(self.etcd_lease(of.0)) {
            steps.push(Step::LeaseGrantAgain(of));
        }
        if sent.write.is_some() {
            steps.push(Step::TxnAgain(of));
        }
        let one_only = self.rules.has(Rule::OneLateWrite);
        let may_write = state.spent.late_writes == 0 || !one_only;
        if sent.incarnation.is_some() && may_write {
            steps.push(Step::WriteIncarnationAgain(of));
        }
        if sent.row.is_some() && may_write {
            steps.push(Step::BeginEpochAgain(of));
        }
        if sent.revoke.is_some_and(|id| state.etcd.has_lease(id)) {
            steps.push(Step::RevokeAgain(of));
        }
    }

    pub(super) fn has_copies(&self, state: &State) -> bool {
        state.spent.copies < self.most.copies
    }

    pub(super) fn fault_steps(&self, state: &State, steps: &mut Vec<Step>) {
        let (spent, most) = (state.spent, self.most);
        for key in state.etcd.keys.iter().flatten().filter(|_| self.expires) {
            steps.push(Step::Expire(key.etcd_lease));
        }
        if spent.snapshots < most.snapshots && state.saved != Some(state.etcd) {
            steps.push(Step::Snapshot);
        }
        if spent.restores < most.restores && state.saved.is_some() {
            steps.push(Step::Restore);
        }
        if spent.grown < most.grown && self.may_grow(state) {
            steps.push(Step::LeadGrows);
        }
    }

    /// Whether many leases of the second partition can be granted and released. An issuer checks
    /// each grant, so the issuer must have detected any earlier restore.
    fn may_grow(&self, state: &State) -> bool {
        if !self.rules.has(Rule::FewEtcdLeases) {
            return true;
        }
        let is_between = |stage: &Stage| matches!(stage, Stage::Answered(_));
        let seen = state.etcd.read(PARTITIONS - 1);
        let judged = judge(self.rules, &seen, Some(Status::of(&state.etcd)));
        let since = state.since_restore;
        let is_noticed = since.incarnation || !self.rules.has(Rule::OneIncarnation);
        is_noticed
            && since.rows[PARTITIONS - 1]
            && matches!(judged, Judgement::Usable(_))
            && !state
                .requests
                .iter()
                .any(|request| is_between(&request.stage))
    }

    fn may_begin(&self, state: &State, place: usize) -> bool {
        let requests = &self.requests;
        let request = requests[place];
        if let Some(earlier) = request.after
            && state.requests[earlier].stage != Stage::Done
        {
            return false;
        }
        let of_lease = |other: &usize| requests[*other].lease == request.lease;
        let others = || (0..requests.len()).filter(of_lease);
        let is_under_way = |other: usize| state.requests[other].stage.is_under_way();
        match request.kind {
            // A repeated request may be sent while the first one is in progress. Interchangeable
            // requests begin in order.
            Kind::Acquire => {
                let mut calls = others().filter(|other| requests[*other].kind != Kind::Acquire);
                let mut earlier = (0..place).filter(|other| self.are_alike(*other, place));
                !calls.any(is_under_way)
                    && !earlier.any(|other| state.requests[other].stage == Stage::New)
            }
            Kind::Renew | Kind::Move | Kind::Release => {
                others().any(|other| state.requests[other].token.is_some())
                    && !others().any(is_under_way)
            }
        }
    }

    /// Whether two requests are interchangeable.
    fn are_alike(&self, one: usize, other: usize) -> bool {
        let requests = &self.requests;
        let is_alone = |request: usize| {
            let lease = requests[request].lease;
            let of_lease = requests.iter().filter(|request| request.lease == lease);
            let follows = requests.iter().any(|other| other.after == Some(request));
            of_lease.count() == 1 && requests[request].after.is_none() && !follows
        };
        let (of_one, of_other) = (requests[one], requests[other]);
        (of_one.kind, of_one.resource, of_one.issuer)
            == (of_other.kind, of_other.resource, of_other.issuer)
            && is_alone(one)
            && is_alone(other)
    }
}
