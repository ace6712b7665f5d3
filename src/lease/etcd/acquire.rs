//! One attempt to acquire: look, and then write what follows, on the condition that it still does.

use std::time::Duration;

use super::{
    clock::Clock,
    look::Look,
    messages::{delete, is_empty, made_at, made_since, put, written_at},
    pending::PendingAcquire,
    server::random_id,
    service::serve,
    stored::{FoundLease, StoredLease, StoredPlace, StoredToken, owner_of, value},
    waiters::PLACE_SECONDS,
};
use crate::{
    epochs::partition_of,
    lease::{Lease, LeaseError, time::whole_ms},
};

/// How often to look for one call before that gives up: each time means that somebody else was faster.
pub(super) const ATTEMPTS: usize = 64;

/// How long to stay away where others are in line, and the lease is not theirs yet.
const HAND_OVER: Duration = Duration::from_secs(1);

/// What became of a request for a lease.
pub(super) enum Asked {
    Granted(Lease),
    /// Another one has it, or is before in line.
    Held {
        left: Duration,
    },
    /// The request is in line.
    Queued,
    /// Too many wait.
    Full,
}

/// What became of a write.
enum Written {
    Granted(Lease),
    /// Somebody is before in line.
    NotFirst,
    /// Things have changed meanwhile.
    Again,
}

impl PendingAcquire {
    /// Asks for the lease once: to be granted, refused, or, where it `waits`, put in line.
    pub(super) async fn ask(&mut self, waits: bool) -> Result<Asked, LeaseError> {
        self.etcd.memory().learn_source().await?;
        for attempt in 0..ATTEMPTS {
            // A grant demands the clock that was seen, and judges it once more, by the length of the log. So at first
            // nobody is asked for that here; where it turns out that the clock is of no use, the next look tells why.
            let asks_for_log = attempt > 0;
            let look = self
                .etcd
                .look_in_life(&self.resource, Some(&self.id), asks_for_log);
            let look = look.await?;
            let held = match &look.lease {
                Some(lease) if lease.is_of(&self.id) && self.etcd.is_held(lease).await? => {
                    Some(lease.clone())
                }
                _ => None,
            };
            let is_closed = look.closed_by.is_some();
            let comes_later = look.waiting > 0 && look.place.is_none();
            if held.is_none() && (is_closed || comes_later) {
                if waits {
                    match self.join(&look).await? {
                        Some(joined) => return Ok(joined),
                        None => continue,
                    }
                }
                let left = match &look.closed_by {
                    Some(key) => self.etcd.closed_for(key).await?,
                    None => HAND_OVER,
                };
                return Ok(Asked::Held { left });
            }
            let Some(clock) = look.clock.usable() else {
                self.etcd.prepare_clock(&self.resource).await?;
                continue;
            };
            match self.grant(&look, clock, held).await? {
                Written::Granted(lease) => return Ok(Asked::Granted(lease)),
                Written::NotFirst if waits => {
                    if let Some(joined) = self.join(&look).await? {
                        return Ok(joined);
                    }
                }
                Written::NotFirst => return Ok(Asked::Held { left: HAND_OVER }),
                Written::Again => {}
            }
        }
        Err(LeaseError::unavailable(TooMuchChange))
    }

    /// Puts the lease, in place of the one that is `held` under the same id, or where there is none.
    async fn grant(
        &mut self,
        look: &Look,
        clock: Clock,
        held: Option<FoundLease>,
    ) -> Result<Written, LeaseError> {
        let keys = self.etcd.keys();
        let (clock_key, lease_key) = (
            keys.clock(partition_of(&self.resource)),
            keys.lease(&self.resource),
        );
        let line = keys.line(&self.resource);
        let place_key = line.place(&self.id);
        let mut compare = vec![written_at(&clock_key, clock.base)];
        compare.push(match &held {
            Some(held) => written_at(&lease_key, held.revision),
            None => made_at(&lease_key, 0),
        });
        match (&held, &look.place) {
            (Some(_), _) => {}
            (None, None) => compare.push(is_empty(line.range())),
            (None, Some(place)) => compare.extend([
                made_at(&place_key, place.since),
                made_since(line.range(), place.since),
            ]),
        }

        let stored = self.stored(look, clock, held.as_ref());
        let etcd_lease = random_id();
        // A lease that this very request was granted is still unknown to everybody else.
        let is_repeated = held
            .as_ref()
            .is_some_and(|held| !self.unused.contains(&held.etcd_lease));
        if !is_repeated {
            self.unused.push(etcd_lease);
        }
        let seconds = stored.ttl.saturating_add(stored.delay);
        let granted = self.etcd.make_lease(etcd_lease, seconds).await?;
        let mut writes = vec![put(&lease_key, &value(&stored), etcd_lease)];
        if look.place.is_some() {
            writes.push(delete(&place_key));
        }
        let written = self
            .etcd
            .transact(&self.resource, Some(&self.id), compare, writes)
            .await;
        let now = match written {
            // It ran out already.
            Err(error) if error.is_not_found() => return Ok(Written::Again),
            written => written?,
        };
        let lease = now.lease.as_ref();
        let lease = lease.filter(|_| now.is_closed_by(etcd_lease));
        if let (Some(lease), true) = (lease, now.clock.usable() == Some(clock)) {
            if let Some(held) = &held {
                self.etcd.revoke_later(held.etcd_lease, &self.background);
            }
            let (partition, n) = (partition_of(&self.resource), now.counted(clock.base));
            let memory = self.etcd.memory();
            if !memory.record_grant(partition, clock.epoch, n).await? {
                // The epoch is over. The next attempt takes another token for it.
                return Ok(Written::Again);
            }
            let ttl = Duration::from_secs(granted.saturating_sub(stored.delay));
            let id = &self.request.lease_id;
            return Ok(Written::Granted(Lease::granted(
                &self.resource,
                id,
                lease.token,
                ttl,
            )));
        }
        if !now.is_closed_by(etcd_lease) {
            self.etcd.revoke_later(etcd_lease, &self.background);
        }
        let is_free = held.is_none() && now.closed_by.is_none();
        match is_free && look.place.is_some() && now.clock.usable() == Some(clock) {
            true => Ok(Written::NotFirst),
            false => Ok(Written::Again),
        }
    }

    /// What is to be stored of the lease.
    fn stored(&self, look: &Look, clock: Clock, held: Option<&FoundLease>) -> StoredLease {
        let kept = held.filter(|held| look.counts(held));
        let known_owner = match held {
            Some(held) => held.stored.owner.clone(),
            None => look.place.as_ref().and_then(|place| place.owner.clone()),
        };
        StoredLease {
            id: self.id.as_str().into(),
            // The owner stays the one that was named first.
            owner: known_owner.or_else(|| owner_of(&self.request)),
            ttl: seconds(self.request.ttl).max(1),
            delay: seconds(self.request.lock_delay),
            epoch: clock.epoch.get(),
            clock: clock.base,
            token: match kept {
                Some(kept) => StoredToken::Kept(kept.token.get()),
                None => StoredToken::New { at_least: 0 },
            },
        }
    }

    /// Takes a place in line, or that of an earlier request under the same lease id. `None` where somebody else was
    /// faster.
    async fn join(&mut self, look: &Look) -> Result<Option<Asked>, LeaseError> {
        let place = look.place.as_ref();
        if place.is_none() && look.waiting >= self.waiters.max_per_resource() {
            return Ok(Some(Asked::Full));
        }
        if self.seat.is_none() {
            let Some(seat) = self.waiters.join(&self.resource, &self.id) else {
                return Ok(Some(Asked::Full));
            };
            let made = self.etcd.make_lease(seat.etcd_lease(), PLACE_SECONDS).await;
            self.seat = Some(seat);
            made?;
        }
        serve(&self.waiters, &self.resource);
        let Some(seat) = &self.seat else {
            return Ok(None);
        };
        let etcd_lease = seat.etcd_lease();
        if place.is_some_and(|place| place.etcd_lease == etcd_lease) {
            return Ok(Some(Asked::Queued));
        }
        let key = self.etcd.keys().line(&self.resource).place(&self.id);
        let owner = place.and_then(|place| place.owner.clone());
        let stored = StoredPlace {
            owner: owner.or_else(|| owner_of(&self.request)),
        };
        let compare = written_at(&key, place.map_or(0, |place| place.revision));
        let write = put(&key, &value(&stored), etcd_lease);
        let written = self
            .etcd
            .transact(&self.resource, Some(&self.id), vec![compare], vec![write])
            .await;
        match written {
            Ok(now) => {
                let place = now.place.as_ref();
                let is_ours = place.is_some_and(|place| place.etcd_lease == etcd_lease);
                Ok(is_ours.then_some(Asked::Queued))
            }
            // This process was away for so long that the place has ended.
            Err(error) if error.is_not_found() => {
                self.seat = None;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Whole seconds, rounded up: etcd counts no others.
pub(super) fn seconds(time: Duration) -> u64 {
    whole_ms(time).div_ceil(1_000)
}

/// The transaction never came to run on what had been seen.
#[derive(Debug, thiserror::Error)]
#[error("others were faster each time")]
pub(super) struct TooMuchChange;
