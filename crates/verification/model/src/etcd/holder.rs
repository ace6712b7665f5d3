//! Renewals, releases, and requests that give up.

use super::{
    Of, Promise, Rule, Rules,
    bounds::{Etcd, Kind, Request},
    judge::{Judgement, Status, judge},
    server::{Key, Row},
    state::{Stage, State},
};

impl Etcd {
    pub(super) fn decide_renewal(
        &self,
        state: &mut State,
        of: Of,
        judged: Judgement,
        key: Option<Key>,
    ) {
        let place = of.0;
        let counts = |key: &Key| match judged {
            Judgement::Usable(row) => key.counts(&row) || !self.rules.has(Rule::RenewalCounts),
            Judgement::NeedsEpoch(_) => !self.rules.has(Rule::RenewalCounts),
            Judgement::NeedsIncarnation(_) => false,
        };
        let found = state.requests[place].found;
        match key.filter(counts) {
            Some(key) if found == Some(key.etcd_lease) => {
                self.answer(state, of, key.token);
            }
            Some(key) => state.requests[place].stage = Stage::Found(key.etcd_lease),
            None => state.requests[place].stage = Stage::Over,
        }
    }

    /// Reads the key, for a renewal or a release whose issuer does not have the etcd lease in
    /// memory.
    pub(super) fn read_key(&self, state: &mut State, of: Of) {
        let Of(place, request) = of;
        if state.requests[place].stage == Stage::New {
            state.requests[place].before = self.before(state, &request);
        }
        let key = state.etcd.keys[request.resource];
        let key = key.filter(|key| key.lease == request.lease);
        state.requests[place].stage = match key {
            Some(key) => Stage::Found(key.etcd_lease),
            None => Stage::Over,
        };
    }

    pub(super) fn keep_alive(&self, state: &mut State, of: Of) -> Option<()> {
        let Of(place, request) = of;
        let lease = usize::from(request.lease);
        let cached = state.issuers[request.issuer].etcd_leases[lease];
        let (etcd_lease, is_cached) = match state.requests[place].stage {
            Stage::Found(found) => (found, false),
            _ => (cached?, true),
        };
        if is_cached {
            state.requests[place].before = self.before(state, &request);
        }
        if state.etcd.has_lease(etcd_lease) {
            state.requests[place].found = Some(etcd_lease);
            state.requests[place].stage = Stage::Alive(etcd_lease);
            if !self.rules.has(Rule::RenewalReads) {
                let own = state.requests[place].before.own;
                self.answer(state, of, own);
            }
        } else if is_cached {
            state.issuers[request.issuer].etcd_leases[lease] = None;
            state.requests[place].stage = Stage::ReadsKey;
        } else {
            state.requests[place].stage = Stage::Over;
        }
        Some(())
    }

    pub(super) fn release(&self, state: &mut State, of: Of) -> Option<()> {
        let Of(place, request) = of;
        let lease = usize::from(request.lease);
        let cached = state.issuers[request.issuer].etcd_leases[lease].take();
        let etcd_lease = match state.requests[place].stage {
            Stage::Found(found) => found,
            _ => {
                state.requests[place].before = self.before(state, &request);
                cached?
            }
        };
        let existed = self.revoke(state, place, etcd_lease);
        if !existed && self.rules.has(Rule::NotFoundReads) {
            state.requests[place].stage = Stage::ReadsKey;
            return Some(());
        }
        let key = state.etcd.keys[request.resource];
        if key.is_some_and(|key| self.was_to_be_released(state, &request, &key)) {
            state.fail(Promise::Released);
        }
        state.released[lease] = true;
        state.requests[place].stage = Stage::Done;
        Some(())
    }

    /// Whether the release should have deleted this key. If another issuer has moved the key for a
    /// renewal that was never answered, the issuer that releases the lease cannot know of the move.
    fn was_to_be_released(&self, state: &State, released: &Request, key: &Key) -> bool {
        let mut requests = self.requests.iter().enumerate();
        let is_unknown = requests.any(|(place, request)| {
            request.issuer != released.issuer
                && state.requests[place].stage == Stage::Over
                && self.etcd_lease(place) == key.etcd_lease
        });
        let row = counting_row(state, released.resource);
        key.lease == released.lease && row.is_some_and(|row| key.counts(&row)) && !is_unknown
    }

    /// Gives up a request that is in progress. A renewal revokes nothing. A repeated request
    /// revokes nothing if its lease may have been granted to an earlier request.
    pub(super) fn give_up(&self, state: &mut State, of: Of) {
        let Of(place, request) = of;
        let has_moved = state.requests[place].found.is_some();
        let leaves = request.kind == Kind::Move || has_moved && self.rules.has(Rule::GiveUpOwn);
        state.requests[place].stage = Stage::Over;
        if !leaves {
            self.revoke(state, place, self.etcd_lease(place));
        }
    }

    /// Revokes an etcd lease. Returns whether it existed.
    pub(super) fn revoke(&self, state: &mut State, place: usize, etcd_lease: u8) -> bool {
        let resource = self.requests[place].resource;
        let row = counting_row(state, resource);
        let (existed, ended) = state.etcd.end_lease(etcd_lease);
        state.requests[place].sent.revoke = Some(etcd_lease);
        if let (Some(key), Some(row)) = (ended, row)
            && key.counts(&row)
        {
            let releases = self.requests[place].kind == Kind::Release;
            let is_own = releases && state.requests[place].before.own == key.token;
            let mut requests = self.requests.iter().zip(&state.requests);
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

/// Returns the row that is valid in the current incarnation. After a restore, no row is valid until
/// an issuer has begun an epoch.
fn counting_row(state: &State, resource: usize) -> Option<Row> {
    let seen = state.etcd.read(resource);
    match judge(Rules::default(), &seen, Some(Status::of(&state.etcd))) {
        Judgement::Usable(row) => Some(row),
        Judgement::NeedsIncarnation(_) | Judgement::NeedsEpoch(_) => None,
    }
}
