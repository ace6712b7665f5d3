//! Positions in the queue of a resource: a range of keys, in the order in which they were created.
//!
//! All positions of a process share one etcd lease, which [`watch`](crate::watch) keeps alive. The
//! id of that etcd lease is the number of the listener. If the process exits or is frozen, its
//! positions expire, and the waiter behind them moves up.

use std::{mem, time::Duration};

use tower_fence::{
    Resource,
    lease::{LeaseError, backend::Reply},
};

use crate::{
    acquire::{Acquiring, Next},
    error::EtcdError,
    etcd::Etcd,
    gateway::To,
    messages::{delete, put, written_at},
    stored::{FoundPosition, StoredPosition, owner_of, value},
};

impl Acquiring<'_> {
    /// Joins the queue, or takes over the position of an earlier request under the same lease id.
    pub(crate) async fn join(
        &mut self,
        position: Option<FoundPosition>,
        etcd_lease: i64,
        left: Duration,
    ) -> Result<Next, LeaseError> {
        let (etcd, ticket) = (self.etcd, self.ask.ticket);
        let is_ours = |position: &FoundPosition| {
            (position.stored.ticket, position.etcd_lease) == (ticket, etcd_lease)
        };
        let joined = position.is_none() || self.has_lost_join;
        if position.as_ref().is_some_and(is_ours) {
            return Ok(Next::Reply(Reply::Queued { left, joined }));
        }
        let known_owner = position.as_ref().and_then(|it| it.stored.owner.clone());
        let stored = StoredPosition {
            ticket,
            owner: known_owner.or_else(|| owner_of(self.ask)),
        };
        let key = etcd.keys.position(self.resource, &self.id);
        let revision = position.map_or(0, |position| position.revision);
        let compare = [written_at(&key, revision)];
        let write = vec![put(&key, &value(&stored), etcd_lease)];
        let written = etcd
            .write_once(self.resource, self.reads(), &compare, write)
            .await;
        match written {
            Ok((true, _)) => Ok(Next::Reply(Reply::Queued { left, joined })),
            Ok((false, now)) => Ok(Next::Judge(Box::new(now))),
            // The positions of this process have expired, for example during a pause. The listener
            // of the process reconnects.
            Err(error) if error.is_not_found() => Ok(Next::Reply(Reply::Again)),
            Err(error) => {
                if error.may_have_run {
                    // The write may be executed after this request has ended.
                    etcd.memory.note_stray();
                    if !mem::replace(&mut self.has_lost_join, true) {
                        return Ok(Next::Read);
                    }
                }
                Err(error.into())
            }
        }
    }

    /// Refuses the request. If it has a position in the queue, removes the position.
    pub(crate) async fn refuse(
        &self,
        position: Option<FoundPosition>,
        left: Duration,
    ) -> Result<Next, LeaseError> {
        let refused = &self.etcd.memory.refused;
        refused.insert(self.resource.clone(), (), left);
        if let Some(position) = position {
            let etcd = self.etcd;
            etcd.leave(self.resource, &self.id, &position, self.ask.ticket)
                .await?;
        }
        Ok(Next::Reply(Reply::Held { left }))
    }
}

impl Etcd {
    /// Removes a position from the queue, if this request still has it.
    pub(crate) async fn leave(
        &self,
        resource: &Resource,
        id: &str,
        position: &FoundPosition,
        ticket: i64,
    ) -> Result<(), EtcdError> {
        if position.stored.ticket != ticket {
            return Ok(());
        }
        let key = self.keys.position(resource, id);
        let compare = [written_at(&key, position.revision)];
        self.txn(To::Any, &compare, &[delete(&key)], &[]).await?;
        Ok(())
    }
}
