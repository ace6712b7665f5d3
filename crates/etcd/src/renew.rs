//! Step that renews a lease: KeepAlive, a transaction that reads the key, and a Status call.
//!
//! KeepAlive alone is not enough. The etcd lease may no longer have its key, or may have ended and
//! been created again by a late repetition of its LeaseGrant.

use std::{sync::Arc, time::Duration};

use tower_fence::{
    Resource, Token,
    lease::{
        LeaseError, TooMuchChange,
        backend::{Granted, Renewal, Reply, Seen},
    },
};

use crate::{
    counter::{Counter, CounterState},
    error::EtcdError,
    etcd::{ATTEMPTS, Etcd},
    etcd_lease::{random_id, seconds},
    messages::{put, written_at},
    stored::{FoundLease, StoredLease, StoredToken, value},
    view::{Reads, View},
};

impl Etcd {
    pub(crate) async fn renew(
        self: &Arc<Self>,
        resource: &Resource,
        renewal: &Renewal,
        seen: &Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        if let Some(reply) = self.renew_known(resource, renewal, seen).await? {
            return Ok(reply);
        }
        let mut seen = *seen;
        for _ in 0..ATTEMPTS {
            if let Some(reply) = self.renew_found(resource, renewal, &mut seen).await? {
                return Ok(reply);
            }
        }
        Err(LeaseError::unavailable(TooMuchChange))
    }

    /// Renews a lease whose etcd lease is in memory, if neither its TTL nor its token changes.
    /// Returns `None` if the lease has to be read first.
    async fn renew_known(
        &self,
        resource: &Resource,
        renewal: &Renewal,
        seen: &Seen<'_>,
    ) -> Result<Option<Reply>, LeaseError> {
        let (id, ttl) = (renewal.lease.stored(), ttl_of(renewal));
        let key = (resource.clone(), id.clone());
        let known = self.memory.leases.get(&key);
        let known = known.filter(|known| known.ttl == ttl && !renewal.may_take_token());
        let Some(known) = known else {
            return Ok(None);
        };
        let left = self.keep_alive(known.etcd_lease).await?;
        let view = self.view(resource, Reads::default()).await?;
        let renewed = self.confirm(view, &id, known.etcd_lease, seen).await?;
        Ok(renewed.filter(|_| left > 0).map(|renewed| {
            let stored = &renewed.lease.stored;
            self.memory
                .note_lease(resource, stored, known.etcd_lease, left);
            renewed.reply(left)
        }))
    }

    /// Reads a lease and renews it. Returns `None` if the lease has changed in the meantime.
    async fn renew_found(
        self: &Arc<Self>,
        resource: &Resource,
        renewal: &Renewal,
        seen: &mut Seen<'_>,
    ) -> Result<Option<Reply>, LeaseError> {
        let (id, ttl) = (renewal.lease.stored(), ttl_of(renewal));
        let view = self.view(resource, Reads::default()).await?;
        let Some(held) = view.lease_of(&id).cloned() else {
            return Ok(Some(Reply::Lost));
        };
        let CounterState::Begun {
            counter,
            is_used_up,
        } = view.counter.judge(seen)
        else {
            return Ok(Some(Reply::Lost));
        };
        if !counter.granted(&held) || !self.is_held(&held).await? {
            return Ok(Some(Reply::Lost));
        }
        let token = match next_token(&held, renewal) {
            Ok(token) => token,
            Err(highest) => return Ok(Some(Reply::Exhausted(highest))),
        };
        let takes_token = matches!(token, StoredToken::New { .. });
        if takes_token && is_used_up {
            let reply = self.needs_epoch(resource, view.counter, seen);
            return reply.await.map(Some);
        }
        // The TTL of an etcd lease cannot be changed. For another TTL, the key moves to a new etcd
        // lease.
        let moves = ttl != held.stored.ttl;
        let writes = moves || takes_token;
        let (etcd_lease, lasts) = match moves {
            false => (held.etcd_lease, self.keep_alive(held.etcd_lease).await?),
            true => {
                let (new, delay) = (random_id(), held.stored.delay);
                (new, self.make_lease(new, ttl.saturating_add(delay)).await?)
            }
        };
        let stored = StoredLease {
            ttl,
            token,
            ..held.stored.clone()
        };
        let after = match writes {
            false => self.view(resource, Reads::default()).await,
            true => {
                self.memory.leases.take(&(resource.clone(), id.clone()));
                let key = self.keys.lease(resource);
                let mut compare = self.is_unchanged(resource, &counter).to_vec();
                compare.push(written_at(&key, held.revision));
                let write = put(&key, &value(&stored), etcd_lease);
                self.write(resource, Reads::default(), &compare, vec![write])
                    .await
            }
        };
        let after = match after {
            // The etcd lease has already ended.
            Err(error) if error.is_not_found() => return Ok(None),
            after => after?,
        };
        if writes {
            counter.note_write(seen);
        }
        let is_as_expected = |lease: &FoundLease| match writes {
            false => lease.revision == held.revision,
            true => lease.etcd_lease == etcd_lease && lease.stored == stored,
        };
        if lasts == 0 || !after.lease.as_ref().is_some_and(is_as_expected) {
            // If the key is attached to this etcd lease, another renewal has changed the key since.
            if moves && !after.is_blocked_by(etcd_lease) {
                self.revoke_later(etcd_lease);
            }
            return Ok(None);
        }
        if moves {
            // Revoke the earlier etcd lease. Otherwise a process that has it in memory would revoke
            // it on a release and report success, although the lease is still held.
            self.revoke_if_there(held.etcd_lease).await?;
        }
        let Some(renewed) = self.confirm(after, &id, etcd_lease, seen).await? else {
            return Ok(Some(Reply::Lost));
        };
        let left = lasts.saturating_sub(stored.delay);
        self.memory
            .note_lease(resource, &renewed.lease.stored, etcd_lease, left);
        Ok(Some(renewed.reply(left)))
    }

    /// Checks that a lease is held, under this id, with this etcd lease, and in the current
    /// incarnation of etcd.
    async fn confirm(
        &self,
        mut view: View,
        id: &str,
        etcd_lease: i64,
        seen: &Seen<'_>,
    ) -> Result<Option<Renewed>, EtcdError> {
        let lease = view.lease_of(id).cloned();
        let Some(lease) = lease.filter(|lease| lease.etcd_lease == etcd_lease) else {
            return Ok(None);
        };
        let header = view.counter.header;
        view.counter.log = self.log_after(&header).await?;
        let counter = view.counter.valid(seen);
        let counter = counter.filter(|counter| counter.granted(&lease));
        Ok(counter.map(|counter| Renewed {
            lease,
            counter,
            revision: header.revision,
        }))
    }
}

/// Lease that was renewed, with its counter and the revision in which both were read.
struct Renewed {
    lease: FoundLease,
    counter: Counter,
    revision: i64,
}

impl Renewed {
    /// Returns the reply for a lease that has `left` seconds left.
    fn reply(&self, left: u64) -> Reply {
        let granted = Granted::new(self.lease.token, Duration::from_secs(left));
        let n = self.counter.counted(self.revision);
        Reply::Granted(granted.counted(self.counter.epoch, n))
    }
}

/// Returns the TTL in seconds.
fn ttl_of(renewal: &Renewal) -> u64 {
    seconds(renewal.ttl).max(1)
}

/// Returns the token that a renewal grants. If there is no token above that of the lease, returns
/// the token of the lease as the error.
fn next_token(held: &FoundLease, renewal: &Renewal) -> Result<StoredToken, i64> {
    let token = held.token.get();
    let mut lowest = renewal.at_least.map_or(0, Token::get);
    if renewal.new_token {
        lowest = lowest.max(token + 1);
    }
    if token >= lowest {
        return Ok(StoredToken::Kept(token));
    }
    if lowest > Token::MAX.get() {
        return Err(token);
    }
    // If the lowest token is above the counter, the counter is not raised, because that token
    // concerns only this lease.
    Ok(StoredToken::New { at_least: lowest })
}
