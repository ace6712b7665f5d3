//! Step that renews a lease: KeepAlive, a transaction that reads the key, and a Status call.
//!
//! KeepAlive alone is not enough. The etcd lease may no longer have its key, or may have ended and
//! been created again by a late repetition of its LeaseGrant.

use std::sync::Arc;

use tower_fence::{
    Resource, Token,
    lease::{
        LeaseError, TooMuchChange,
        backend::{Renewal, Reply, Seen},
    },
};

use crate::{
    counter::CounterState,
    etcd::{ATTEMPTS, Etcd},
    etcd_lease::{random_id, seconds},
    replace::{Replaced, Replacement},
    stored::{FoundLease, StoredLease, StoredToken},
    view::Reads,
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
        if left == 0 {
            return Ok(None);
        }
        let view = self.view(resource, Reads::default()).await?;
        let etcd_lease = (known.etcd_lease, left);
        Ok(self.confirm(resource, view, &id, etcd_lease, seen).await?)
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
        let (etcd_lease, lasts) = match moves {
            false => (held.etcd_lease, self.keep_alive(held.etcd_lease).await?),
            true => {
                let (new, delay) = (random_id(), held.stored.delay);
                (new, self.make_lease(new, ttl.saturating_add(delay)).await?)
            }
        };
        if lasts == 0 {
            return Ok(None);
        }
        if !moves && !takes_token {
            let after = self.view(resource, Reads::default()).await?;
            let revision = after.lease.as_ref().map(|lease| lease.revision);
            if revision != Some(held.revision) {
                return Ok(None);
            }
            let confirmed = self.confirm(resource, after, &id, (etcd_lease, lasts), seen);
            return Ok(Some(confirmed.await?.unwrap_or(Reply::Lost)));
        }
        let replacement = Replacement {
            held: &held,
            counter: &counter,
            stored: &StoredLease {
                ttl,
                token,
                ..held.stored.clone()
            },
            etcd_lease,
            lasts,
            also: vec![],
        };
        Ok(match self.replace(resource, replacement, seen).await? {
            Replaced::Reply(reply) => Some(reply),
            Replaced::Changed => None,
            Replaced::Invalid => Some(Reply::Lost),
        })
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
