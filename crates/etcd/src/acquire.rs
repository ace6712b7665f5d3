//! Step that acquires a lease: LeaseGrant, a transaction, and a Status call. The step reads the
//! resource first if the counter is not in memory, if the last request for the resource was
//! refused, or if the request waits or has waited.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tower_fence::{
    Resource,
    epochs::partition_of,
    lease::{
        LeaseError, TooMuchChange,
        backend::{Ask, Reply, Seen, Waits},
    },
};

use crate::{
    counter::{Counter, CounterState},
    etcd::{ATTEMPTS, Etcd},
    etcd_lease::{random_id, seconds},
    messages::{created_at, created_since, delete, is_empty, put, written_at},
    replace::{Replaced, Replacement},
    stored::{FoundLease, FoundPosition, StoredLease, StoredToken, owner_of, value},
    view::{Reads, View},
};

/// Time for which a free resource is reported as blocked if other requests wait for it.
const HAND_OVER: Duration = Duration::from_secs(1);

/// Request whose step is being executed.
pub(crate) struct Acquiring<'a> {
    pub(crate) etcd: &'a Arc<Etcd>,
    pub(crate) resource: &'a Resource,
    pub(crate) ask: &'a Ask,
    /// The stored form of the lease id.
    pub(crate) id: String,
    seen: Seen<'a>,
    waits: &'a Waits,
    /// The etcd lease that was created for the grant and has no key yet, and its TTL in seconds.
    unused: Option<(i64, u64)>,
    /// Whether a write of the lease's key got no answer.
    has_lost_answer: bool,
    /// Whether a write of the request's position got no answer.
    pub(crate) has_lost_join: bool,
}

/// Basis of a grant.
pub(crate) struct Grounds {
    counter: Counter,
    /// The lease that is held under the same id.
    held: Option<FoundLease>,
    /// The position of the request, which is the first in the queue.
    position: Option<FoundPosition>,
}

/// Next action of a step.
pub(crate) enum Next {
    Read,
    Judge(Box<View>),
    Grant(Grounds),
    Reply(Reply),
}

impl<'a> Acquiring<'a> {
    pub(crate) fn new(
        etcd: &'a Arc<Etcd>,
        resource: &'a Resource,
        ask: &'a Ask,
        waits: &'a Waits,
        seen: Seen<'a>,
    ) -> Self {
        Self {
            etcd,
            resource,
            ask,
            id: ask.lease.stored(),
            seen,
            waits,
            unused: None,
            has_lost_answer: false,
            has_lost_join: false,
        }
    }

    /// Executes the step.
    pub(crate) async fn run(mut self) -> Result<Reply, LeaseError> {
        let memory = &self.etcd.memory;
        let counter = memory.counter(partition_of(self.resource), &self.seen);
        let mut next = match (self.waits, counter) {
            (Waits::No, Some(counter)) if memory.refused.take(self.resource).is_none() => {
                Next::Grant(Grounds {
                    counter,
                    held: None,
                    position: None,
                })
            }
            _ => Next::Read,
        };
        // Each attempt takes up to three of these iterations: read, judge, and write.
        for _ in 0..3 * ATTEMPTS {
            next = match next {
                Next::Read => {
                    Next::Judge(Box::new(self.etcd.view(self.resource, self.reads()).await?))
                }
                Next::Judge(view) => self.judge(*view).await?,
                Next::Grant(grounds) => self.grant(grounds).await?,
                Next::Reply(reply) => return Ok(self.finish(reply)),
            };
        }
        Err(LeaseError::unavailable(TooMuchChange))
    }

    /// Returns the additional data that the step reads. For a request that joins the queue, the
    /// step need not read which position is the first, because a watch reports the request's turn.
    pub(crate) fn reads(&self) -> Reads<'_> {
        Reads {
            position: Some(&self.id),
            first: matches!(self.waits, Waits::Yes { queued: true, .. } | Waits::Leaves),
        }
    }

    /// Revokes an etcd lease that was not used, and returns the reply.
    fn finish(&mut self, reply: Reply) -> Reply {
        if let Some((unused, _)) = self.unused.take() {
            self.etcd.memory.attempts.take(&self.ask.ticket);
            self.etcd.revoke_later(unused);
        }
        reply
    }

    /// Decides whether the lease can be granted. If it cannot, the request joins the queue or is
    /// refused.
    async fn judge(&mut self, mut view: View) -> Result<Next, LeaseError> {
        let held = match view.lease_of(&self.id) {
            Some(lease) if self.etcd.is_held(lease).await? => Some(lease.clone()),
            _ => None,
        };
        let position = view.position.take();
        if held.is_none() {
            let is_displaced = position.as_ref().is_some_and(|position| {
                matches!(self.waits, Waits::Yes { queued: true, .. })
                    && position.stored.ticket != self.ask.ticket
            });
            if is_displaced {
                return Ok(Next::Reply(Reply::Displaced));
            }
            let since = position.as_ref().map(|position| position.since);
            if view.blocked_by.is_some()
                || (view.waiting > 0 && (since.is_none() || view.first != since))
            {
                let left = match &view.blocked_by {
                    Some(key) => self.etcd.blocked_for(key).await?,
                    None => HAND_OVER,
                };
                return match self.waits {
                    Waits::Yes { listener, .. } => self.join(position, *listener, left).await,
                    _ => self.refuse(position, left).await,
                };
            }
        }
        match view.counter.judge(&self.seen) {
            CounterState::Begun {
                counter,
                is_used_up: false,
            } => {
                let partition = partition_of(self.resource);
                self.etcd.memory.note_counter(partition, &counter);
                Ok(Next::Grant(Grounds {
                    counter,
                    held,
                    position,
                }))
            }
            _ => {
                let etcd = self.etcd;
                let reply = etcd.needs_epoch(self.resource, view.counter, &self.seen);
                Ok(Next::Reply(reply.await?))
            }
        }
    }

    /// Writes the lease if the resource has none. Replaces a lease that is held under the same id.
    async fn grant(&mut self, grounds: Grounds) -> Result<Next, LeaseError> {
        let (etcd, resource) = (self.etcd, self.resource);
        let stored = self.stored(&grounds);
        let (etcd_lease, lasts) = self.etcd_lease(&stored).await?;
        let Grounds {
            counter,
            held,
            position,
        } = grounds;
        let (key, queue) = (etcd.keys.lease(resource), etcd.keys.queue(resource));
        let position_key = etcd.keys.position(resource, &self.id);
        let leaves: Vec<_> = position.iter().map(|_| delete(&position_key)).collect();
        if let Some(held) = &held {
            let replacement = Replacement {
                held,
                counter: &counter,
                stored: &stored,
                etcd_lease,
                lasts,
                also: leaves,
            };
            return self.repeat(replacement).await;
        }
        let mut compare = etcd.is_unchanged(resource, &counter).to_vec();
        compare.push(written_at(&key, 0));
        match &position {
            None => compare.push(is_empty(&queue)),
            Some(position) => compare.extend([
                created_at(&position_key, position.since),
                created_since(&queue, position.since),
            ]),
        }
        let writes = [vec![put(&key, &value(&stored), etcd_lease)], leaves].concat();
        let written = etcd.write_once(resource, self.reads(), &compare, writes);
        let now = match written.await {
            Ok((_, now)) => now,
            // The new etcd lease has already expired.
            Err(error) if error.is_not_found() => {
                self.unused = None;
                return Ok(Next::Read);
            }
            // The key may have been written. Read it before the write is repeated. Otherwise the
            // repeated write could restore the key after another request has moved it to another
            // etcd lease, and the key would be deleted with the earlier etcd lease.
            Err(error) if error.may_have_run && !self.has_lost_answer => {
                self.has_lost_answer = true;
                etcd.view(resource, self.reads()).await?
            }
            Err(error) => return Err(error.into()),
        };
        if !now.is_written(&stored, etcd_lease) {
            return self.missed(now, etcd_lease).await;
        }
        // The key is attached to the etcd lease.
        self.unused = None;
        counter.note_write(&mut self.seen);
        let confirmed = etcd.confirm(resource, now, &self.id, (etcd_lease, lasts), &self.seen);
        match confirmed.await? {
            Some(reply) => {
                etcd.memory.attempts.take(&self.ask.ticket);
                Ok(Next::Reply(reply))
            }
            None => self.judge_invalid().await,
        }
    }

    /// Returns the next action after a write that was not executed, or whose response is missing.
    async fn missed(&mut self, now: View, etcd_lease: i64) -> Result<Next, LeaseError> {
        if now.is_blocked_by(etcd_lease) && now.lease.is_none() {
            // The epoch ran out of tokens in the meantime, so the key has no token.
            self.unused = None;
            self.etcd.revoke_if_there(etcd_lease).await?;
            return Ok(Next::Read);
        }
        // A copy of the write may have been executed. Another request may then have moved the key,
        // and may be about to revoke this etcd lease. The next write therefore uses a new etcd
        // lease, unless the key still has this one.
        let may_be_moved = self.has_lost_answer && !now.is_blocked_by(etcd_lease);
        if may_be_moved && let Some((used, _)) = self.unused.take() {
            self.etcd.revoke_later(used);
        }
        Ok(Next::Judge(Box::new(now)))
    }

    /// Replaces a lease that is held under the same id.
    async fn repeat(&mut self, replacement: Replacement<'_>) -> Result<Next, LeaseError> {
        // If the lease has changed, another request may be about to revoke this etcd lease. The
        // next write therefore uses a new one.
        self.unused = None;
        let etcd = self.etcd;
        let replaced = etcd.replace(self.resource, replacement, &mut self.seen);
        match replaced.await? {
            Replaced::Reply(reply) => {
                etcd.memory.attempts.take(&self.ask.ticket);
                Ok(Next::Reply(reply))
            }
            Replaced::Changed => Ok(Next::Read),
            Replaced::Invalid => self.judge_invalid().await,
        }
    }

    /// Returns the next action after a grant whose token is not valid: etcd was restored from a
    /// snapshot, so a new epoch must begin. The step then runs again and finds the lease.
    async fn judge_invalid(&self) -> Result<Next, LeaseError> {
        let mut now = self.etcd.view(self.resource, self.reads()).await?;
        now.counter.log = self.etcd.log_after(&now.counter.header).await?;
        Ok(Next::Judge(Box::new(now)))
    }

    /// Returns the etcd lease for the key, and its TTL in seconds. If the request is dropped, the
    /// etcd lease is revoked, unless another request has used the same lease id.
    async fn etcd_lease(&mut self, stored: &StoredLease) -> Result<(i64, u64), LeaseError> {
        let (attempts, ticket) = (&self.etcd.memory.attempts, self.ask.ticket);
        let wanted = stored.ttl.saturating_add(stored.delay);
        let id = self.unused.map_or_else(random_id, |(id, _)| id);
        match stored.ticket {
            Some(_) => attempts.insert(ticket, id, Duration::from_secs(wanted)),
            None => drop(attempts.take(&ticket)),
        }
        if let Some(unused) = self.unused {
            return Ok(unused);
        }
        let made = (id, self.etcd.make_lease(id, wanted).await?);
        self.unused = Some(made);
        Ok(made)
    }

    /// Returns the value of the lease's key.
    fn stored(&self, grounds: &Grounds) -> StoredLease {
        let Grounds {
            counter,
            held,
            position,
        } = grounds;
        let (ask, held) = (self.ask, held.as_ref());
        let kept = held.filter(|held| counter.granted(held));
        let known_owner = match held {
            Some(held) => held.stored.owner.clone(),
            None => position
                .as_ref()
                .and_then(|position| position.stored.owner.clone()),
        };
        StoredLease {
            id: self.id.clone(),
            ticket: match held {
                Some(held) => held.stored.ticket.filter(|ticket| *ticket == ask.ticket),
                None => Some(ask.ticket),
            },
            // The lease keeps the owner that was named first.
            owner: known_owner.or_else(|| owner_of(ask)),
            granted_at: held.map_or_else(seconds_since_1970, |held| held.stored.granted_at),
            ttl: seconds(ask.ttl).max(1),
            delay: seconds(ask.lock_delay),
            epoch: counter.epoch.get(),
            base: counter.base,
            token: match kept {
                Some(kept) => StoredToken::Kept(kept.token.get()),
                None => StoredToken::New { at_least: 0 },
            },
        }
    }
}

fn seconds_since_1970() -> u64 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    time.map_or(0, |time| time.as_secs())
}
