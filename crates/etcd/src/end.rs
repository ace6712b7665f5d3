//! Steps that release, abandon or break a lease. Each lease has its own etcd lease. Revoking the
//! etcd lease deletes the key of the lease, and a renewal in progress then fails.

use std::time::Duration;

use tower_fence::{
    Resource, Token,
    announce::LeaseDigest,
    lease::{
        LeaseError, TooMuchChange,
        backend::{End, Reply},
    },
};

use crate::{
    UnknownStep,
    error::EtcdError,
    etcd::{ATTEMPTS, Etcd},
    memory::Known,
    messages::{delete, written_at},
    view::Reads,
};

impl Etcd {
    pub(crate) async fn end(&self, resource: &Resource, end: &End) -> Result<Reply, LeaseError> {
        let ended = match end {
            End::Release(lease) => self.release(resource, lease).await?,
            End::Abandon { lease, ticket } => {
                let ended = self.abandon(resource, lease, *ticket).await;
                ended.inspect_err(|_| self.memory.note_stray())?
            }
            End::Break(token) => self.break_lease(resource, *token).await?,
            _ => return Err(LeaseError::misconfigured(UnknownStep)),
        };
        Ok(if ended { Reply::Ended } else { Reply::Lost })
    }

    async fn release(&self, resource: &Resource, lease: &LeaseDigest) -> Result<bool, LeaseError> {
        let id = lease.stored();
        let key = (resource.clone(), id.clone());
        // Whether this release, or an earlier attempt, has found the lease. It then reports success
        // even if the lease no longer exists.
        let mut has_seen_lease = false;
        if let Some(known) = self.memory.leases.take(&key) {
            match self.revoke(known.etcd_lease).await {
                Ok(()) => return Ok(true),
                Err(error) if error.is_not_found() => {
                    // If an earlier attempt has revoked the etcd lease, the lease is released. If
                    // not, the key may have moved to another etcd lease.
                    has_seen_lease = known.is_released || error.may_have_run;
                }
                Err(error) => {
                    // If a repetition of this release finds no lease, this release has removed the
                    // lease.
                    let known = Known {
                        is_released: true,
                        ..known
                    };
                    let lasts = Duration::from_secs(known.ttl);
                    self.memory.leases.insert(key, known, lasts);
                    return Err(error.into());
                }
            }
        }
        let reads = Reads {
            position: Some(&id),
            first: false,
        };
        for _ in 0..ATTEMPTS {
            let view = self.view(resource, reads).await?;
            let lease = match view.lease_of(&id) {
                Some(lease) if self.is_held(lease).await? => lease,
                _ => {
                    // The client releases the id of a request that waits. The process of the
                    // request detects that the position is lost. If the client has disconnected,
                    // the process abandons the request. If not, for example because this release
                    // was delayed, the request joins the end of the queue.
                    if let Some(position) = &view.position {
                        let ticket = position.stored.ticket;
                        self.leave(resource, &id, position, ticket).await?;
                    }
                    return Ok(has_seen_lease);
                }
            };
            match self.revoke(lease.etcd_lease).await {
                Ok(()) => return Ok(true),
                Err(error) if error.is_not_found() => has_seen_lease = true,
                Err(error) => return Err(error.into()),
            }
        }
        Err(LeaseError::unavailable(TooMuchChange))
    }

    async fn abandon(
        &self,
        resource: &Resource,
        lease: &LeaseDigest,
        ticket: i64,
    ) -> Result<bool, EtcdError> {
        let id = lease.stored();
        if let Some(etcd_lease) = self.memory.attempts.take(&ticket) {
            // After the revocation, etcd refuses a write of the request that is still in progress.
            self.revoke_if_there(etcd_lease).await?;
        }
        let reads = Reads {
            position: Some(&id),
            first: false,
        };
        let view = self.view(resource, reads).await?;
        if let Some(position) = &view.position {
            self.leave(resource, &id, position, ticket).await?;
        }
        let granted = view.lease_of(&id);
        let Some(lease) = granted.filter(|lease| lease.stored.ticket == Some(ticket)) else {
            return Ok(false);
        };
        self.memory.leases.take(&(resource.clone(), id));
        match self.revoke(lease.etcd_lease).await {
            // Another request has used the same lease id since.
            Err(error) if error.is_not_found() => Ok(false),
            ended => ended.map(|()| true),
        }
    }

    /// Breaks the lease that blocks a resource. If a token is given, breaks the lease only if it
    /// has this token. Deletes the key if it has not changed since it was read, and then revokes
    /// its etcd lease.
    async fn break_lease(
        &self,
        resource: &Resource,
        token: Option<Token>,
    ) -> Result<bool, LeaseError> {
        let key = self.keys.lease(resource);
        let mut tried = None;
        for _ in 0..ATTEMPTS {
            let view = self.view(resource, Reads::default()).await?;
            let Some(blocked_by) = view.blocked_by else {
                // The lease has ended since, perhaps through an attempt whose response was lost.
                return Ok(tried.is_some());
            };
            let is_ours = view.lease.is_some();
            if token.is_some() && view.lease.map(|lease| lease.token) != token {
                // The resource has another lease, or the lease has another token.
                return Ok(tried.is_some_and(|tried| tried != blocked_by.create_revision));
            }
            tried = Some(blocked_by.create_revision);
            let compare = [written_at(&key, blocked_by.mod_revision)];
            let now = self.write(resource, Reads::default(), &compare, vec![delete(&key)]);
            let now = now.await?.blocked_by;
            if now.is_none_or(|now| now.create_revision != blocked_by.create_revision) {
                // The etcd lease of another program may have further keys.
                if is_ours {
                    let _ = self.revoke(blocked_by.lease).await;
                }
                return Ok(true);
            }
        }
        Err(LeaseError::unavailable(TooMuchChange))
    }
}
