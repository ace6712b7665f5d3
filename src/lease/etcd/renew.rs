//! Renewing a lease, and ending one.

use std::{sync::Arc, time::Duration};

use super::{
    acquire::{ATTEMPTS, TooMuchChange, seconds},
    look::Look,
    messages::{delete, put, written_at},
    server::{Etcd, random_id},
    stored::{FoundLease, StoredLease, StoredToken, value},
};
use crate::{
    epochs::partition_of,
    lease::{Lease, LeaseError, LeaseId, Renew, background::Background, stored_id::StoredId},
    token::{Resource, Token},
};

impl Etcd {
    /// Starts the time of a lease anew, if it is held under this id.
    pub(super) async fn renew(
        self: &Arc<Self>,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        let partition = partition_of(resource);
        if request.at_least.is_some() {
            // The resource has seen a higher token than this store's.
            self.memory().doubt(partition);
        }
        let takes_token = request.new_token || request.at_least.is_some();
        if takes_token {
            self.memory().learn_source().await?;
        }
        let stored_id = StoredId::of(id);
        for _ in 0..ATTEMPTS {
            let look = self.look(resource, None).await?;
            let Some(held) = self.counting(&look, &stored_id).await? else {
                return Err(LeaseError::lost(resource));
            };
            let token = match next_token(&held, request) {
                Ok(token) => token,
                Err(highest) => {
                    return Err(LeaseError::Exhausted {
                        resource: resource.clone(),
                        max_token: highest.get(),
                    });
                }
            };
            let renewed = self.renew_once(resource, &look, &held, request.ttl, token);
            let Some((token, ttl, now)) = renewed.await? else {
                continue;
            };
            let Some(clock) = now.as_ref().unwrap_or(&look).clock.usable() else {
                continue;
            };
            let n = now.as_ref().unwrap_or(&look).counted(clock.base);
            if !takes_token {
                // What keeps its token goes on without a database.
                self.memory().record_renewal(partition, clock.epoch, n);
            } else if !self
                .memory()
                .record_grant(partition, clock.epoch, n)
                .await?
            {
                // The epoch is over, so the next look says that the lease is lost.
                continue;
            }
            return Ok(Lease::granted(resource, id, token, ttl));
        }
        Err(LeaseError::unavailable(TooMuchChange))
    }

    /// The lease under this id, where it is held and counts.
    async fn counting(&self, look: &Look, id: &StoredId) -> Result<Option<FoundLease>, LeaseError> {
        match &look.lease {
            Some(lease) if lease.is_of(id) && look.counts(lease) && self.is_held(lease).await? => {
                Ok(Some(lease.clone()))
            }
            _ => Ok(None),
        }
    }

    /// Renews a lease as it was seen. Returns its token, its time, and what was seen with the write, if there was one;
    /// `None` where the lease has changed since.
    async fn renew_once(
        self: &Arc<Self>,
        resource: &Resource,
        look: &Look,
        held: &FoundLease,
        ttl: Duration,
        token: StoredToken,
    ) -> Result<Option<(Token, Duration, Option<Look>)>, LeaseError> {
        let ttl = seconds(ttl).max(1);
        let delay = held.stored.delay;
        let keeps_token = matches!(token, StoredToken::Kept(_));
        if keeps_token && ttl == held.stored.ttl {
            let left = self.keep_alive(&[held.etcd_lease]).await?;
            let left = left.first().copied().unwrap_or(0).unsigned_abs();
            let ttl = Duration::from_secs(left.saturating_sub(delay));
            return Ok((left > delay).then_some((held.token, ttl, None)));
        }
        let Some(clock) = look.clock.usable() else {
            return Ok(None);
        };
        // The time of an etcd lease cannot be changed, so the key moves to another one.
        let etcd_lease = random_id();
        let granted = self
            .make_lease(etcd_lease, ttl.saturating_add(delay))
            .await?;
        let keys = self.keys();
        let (clock_key, key) = (keys.clock(partition_of(resource)), keys.lease(resource));
        let stored = StoredLease {
            ttl,
            token,
            ..held.stored.clone()
        };
        let compare = vec![
            written_at(&clock_key, clock.base),
            written_at(&key, held.revision),
        ];
        let write = put(&key, &value(&stored), etcd_lease);
        let now = self.transact(resource, None, compare, vec![write]).await;
        let now = match now {
            // It ran out already.
            Err(error) if error.is_not_found() => return Ok(None),
            now => now?,
        };
        let (true, Some(lease)) = (now.is_closed_by(etcd_lease), &now.lease) else {
            self.revoke_later(etcd_lease, &Background::here());
            return Ok(None);
        };
        self.revoke_later(held.etcd_lease, &Background::here());
        let ttl = Duration::from_secs(granted.saturating_sub(delay));
        Ok(Some((lease.token, ttl, Some(now))))
    }

    /// Ends the lease under this id, or any where there is no id, if it has the token that was seen. False where there is
    /// none.
    pub(super) async fn end(
        &self,
        resource: &Resource,
        id: Option<&LeaseId>,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        let id = id.map(StoredId::of);
        let key = self.keys().lease(resource);
        let mut has_tried = false;
        let mut tried = 0;
        for _ in 0..ATTEMPTS {
            let look = self.transact_to_end(resource, vec![], vec![]).await?;
            let Some(closed_by) = look.closed_by else {
                // It has ended since, perhaps by an attempt whose answer was lost.
                return Ok(has_tried);
            };
            if let Some(id) = &id {
                let is_held = match &look.lease {
                    Some(lease) => lease.is_of(id) && self.is_held(lease).await?,
                    None => false,
                };
                if !is_held {
                    return Ok(has_tried);
                }
            }
            let token = look.lease.as_ref().map(|lease| lease.token);
            if seen.is_some() && token != seen {
                // Another lease by now, or this one with another token.
                return Ok(has_tried && tried != closed_by.create_revision);
            }
            has_tried = true;
            tried = closed_by.create_revision;
            let compare = vec![written_at(&key, closed_by.mod_revision)];
            let now = self
                .transact_to_end(resource, compare, vec![delete(&key)])
                .await?;
            let is_there = now
                .closed_by
                .is_some_and(|now| now.create_revision == closed_by.create_revision);
            if !is_there {
                // A renewal that is under way finds none to keep alive.
                if closed_by.lease != 0 {
                    self.revoke(closed_by.lease).await;
                }
                return Ok(true);
            }
        }
        Err(LeaseError::unavailable(TooMuchChange))
    }
}

/// The token that a renewal gives; the lease's own where there is none above it.
fn next_token(held: &FoundLease, request: Renew) -> Result<StoredToken, Token> {
    let token = held.token.get();
    let mut lowest = request.at_least.map_or(0, Token::get);
    if request.new_token {
        lowest = lowest.max(token + 1);
    }
    if token >= lowest {
        return Ok(StoredToken::Kept(token));
    }
    if lowest > Token::MAX.get() {
        return Err(held.token);
    }
    // The clock does not follow: where the resource has seen a token from elsewhere, this concerns this lease alone.
    Ok(StoredToken::New { at_least: lowest })
}
