//! One partition: its clock, its leases, and the lines of its waiters.
//!
//! The steps are those of the Redis scripts, under a mutex instead of in a script.

#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

use crate::{
    announce::LeaseDigest,
    epochs::Epoch,
    lease::{
        Acquire, Held, Lease, LeaseError, LeaseId, Owner, Renew,
        time::{after, at_least_1_ms},
    },
    token::{Resource, Token},
};

/// How long a waiter may take to confirm the lease that was granted to it.
const CONFIRM_WAIT: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Partition {
    clock: Option<Clock>,
    grants: HashMap<Resource, Grant>,
    lines: HashMap<Resource, VecDeque<Waiter>>,
    /// How many grants there were after the last sweep.
    swept: usize,
}

/// The token that was granted last is `epoch.token(n)`.
struct Clock {
    epoch: Epoch,
    n: i64,
}

struct Grant {
    lease: LeaseDigest,
    token: Token,
    owner: Option<Owner>,
    /// When the lease ends.
    ends: Instant,
    /// When the resource is open again, if the lease ends by time.
    opens: Instant,
    lock_delay: Duration,
    /// Whether its holder has asked again since it was granted, and so knows of it.
    confirmed: bool,
}

struct Waiter {
    lease: LeaseDigest,
    owner: Option<Owner>,
    wake: Arc<Notify>,
}

/// What became of a request.
pub(super) enum Outcome {
    Granted(Lease),
    Held {
        left: Duration,
    },
    /// Too many wait.
    Full,
    NeedsEpoch {
        last: i64,
    },
}

impl Partition {
    /// Grants a lease, or joins a line of so many, or says what is in the way.
    pub(super) fn ask(
        &mut self,
        resource: &Resource,
        request: &Acquire,
        line: Option<(&Arc<Notify>, usize)>,
    ) -> Outcome {
        let lease = LeaseDigest::of(request.lease_id.expose());
        if self.current(resource).is_none() {
            if let Some(last) = self.used_up() {
                return Outcome::NeedsEpoch { last };
            }
            if !self.hand_over(resource) {
                // There is no line.
                self.put(resource, lease.clone(), request.owner.as_ref());
            }
        }
        let Some(grant) = self.current(resource) else {
            return Outcome::Held {
                left: Duration::ZERO,
            };
        };
        if grant.lease == lease && grant.holds() {
            // New, a repeated request, or the confirmation of what was granted in line.
            grant.confirmed = true;
            // The owner stays the one that was named first.
            if grant.owner.is_none() {
                grant.owner.clone_from(&request.owner);
            }
            grant.lock_delay = request.lock_delay;
            let lease = grant.start(resource, &request.lease_id, request.ttl);
            self.wake_first(resource);
            return Outcome::Granted(lease);
        }
        let left = grant.opens.saturating_duration_since(Instant::now());
        if let Some((wake, limit)) = line {
            let line = self.lines.entry(resource.clone()).or_default();
            if !line.iter().any(|waiter| Arc::ptr_eq(&waiter.wake, wake)) {
                if line.len() >= limit {
                    // A limit of 0 leaves no empty line behind.
                    if line.is_empty() {
                        self.lines.remove(resource);
                    }
                    return Outcome::Full;
                }
                // A repeated request has the place of the one before it, once that gives up.
                let before = line.iter().rposition(|waiter| waiter.lease == lease);
                let known_owner = before.and_then(|place| line[place].owner.clone());
                let waiter = Waiter {
                    lease,
                    owner: known_owner.or_else(|| request.owner.clone()),
                    wake: Arc::clone(wake),
                };
                line.insert(before.map_or(line.len(), |place| place + 1), waiter);
            }
        }
        Outcome::Held { left }
    }

    pub(super) fn renew(
        &mut self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Outcome, LeaseError> {
        let token = self.held_under(resource, id)?.token;
        let mut lowest = request.at_least.unwrap_or(token);
        if request.new_token {
            let next = Token::new(token.get() + 1).map_err(|_| LeaseError::Exhausted {
                resource: resource.clone(),
                max_token: token.get(),
            })?;
            lowest = lowest.max(next);
        }
        if token < lowest {
            let next = match self.next_token() {
                Ok(next) => next,
                Err(last) => return Ok(Outcome::NeedsEpoch { last }),
            };
            // The clock does not follow: where the resource has seen a token from elsewhere, this
            // concerns this lease alone.
            self.held_under(resource, id)?.token = next.max(lowest);
        }
        let grant = self.held_under(resource, id)?;
        let lease = grant.start(resource, id, request.ttl);
        self.wake_first(resource);
        Ok(Outcome::Granted(lease))
    }

    pub(super) fn release(&mut self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        self.held_under(resource, id)?;
        self.end(resource);
        Ok(())
    }

    /// Ends the lease that has this token, or any; then the next in line has it.
    pub(super) fn break_lease(&mut self, resource: &Resource, seen: Option<Token>) -> bool {
        let token = self.current(resource).map(|grant| grant.token);
        (seen.is_none() || token == seen) && self.end(resource)
    }

    /// Ends whatever lease there is; then the next in line has it.
    fn end(&mut self, resource: &Resource) -> bool {
        let ended = self.current(resource).is_some();
        self.grants.remove(resource);
        if self.used_up().is_none() {
            self.hand_over(resource);
        } else {
            // The first in line begins an epoch.
            self.wake_first(resource);
        }
        ended
    }

    /// Leaves the line, and releases what was granted and not confirmed.
    pub(super) fn leave(&mut self, resource: &Resource, id: &LeaseId, wake: &Arc<Notify>) {
        if let Some(line) = self.lines.get_mut(resource) {
            line.retain(|waiter| !Arc::ptr_eq(&waiter.wake, wake));
            if line.is_empty() {
                self.lines.remove(resource);
            }
        }
        // The waiter that is first now may not know when the lease ends.
        self.wake_first(resource);
        let lease = LeaseDigest::of(id.expose());
        let unconfirmed = |grant: &&mut Grant| grant.lease == lease && !grant.confirmed;
        if self.current(resource).filter(unconfirmed).is_some() {
            self.end(resource);
        }
    }

    pub(super) fn inspect(&mut self, resource: &Resource) -> Option<Held> {
        let waiters = self.lines.get(resource).map_or(0, VecDeque::len) as u64;
        let grant = self.current(resource).filter(|grant| grant.holds())?;
        Some(Held {
            token: grant.token,
            owner: grant.owner.clone(),
            ttl: grant.ends.saturating_duration_since(Instant::now()),
            waiters,
        })
    }

    /// The leases that are held on resources whose names come after this one, in order.
    pub(super) fn list(&mut self, after: &str) -> Vec<(Resource, Held)> {
        let names = self.grants.keys().filter(|name| name.as_str() > after);
        let mut names: Vec<Resource> = names.cloned().collect();
        names.sort_unstable();
        let held = |name: Resource| self.inspect(&name).map(|held| (name, held));
        names.into_iter().filter_map(held).collect()
    }

    /// Begins an epoch, unless another caller was faster.
    pub(super) fn begin_epoch(&mut self, epoch: Epoch) {
        if self.used_up().is_some_and(|last| last < epoch.get()) {
            self.clock = Some(Clock { epoch, n: 0 });
        }
    }

    /// Ends an epoch below the highest one and number that are known, with its leases: their tokens are dead.
    pub(super) fn end_epoch(&mut self, highest: (i64, i64)) {
        let Some(clock) = &mut self.clock else { return };
        let Ok(epoch) = Epoch::new(highest.0) else {
            return;
        };
        if (clock.epoch.get(), clock.n) < highest {
            *clock = Clock {
                epoch,
                n: highest.1,
            };
            self.grants.clear();
            for first in self.lines.values().filter_map(VecDeque::front) {
                first.wake.notify_one();
            }
        }
    }

    /// Wakes the first in line, who then asks how long the resource stays closed.
    fn wake_first(&self, resource: &Resource) {
        if let Some(first) = self.lines.get(resource).and_then(VecDeque::front) {
            first.wake.notify_one();
        }
    }

    /// Grants a free lease to the first in line, who confirms it by asking again.
    fn hand_over(&mut self, resource: &Resource) -> bool {
        let Some(line) = self.lines.get_mut(resource) else {
            return false;
        };
        let first = line.pop_front();
        if line.is_empty() {
            self.lines.remove(resource);
        }
        let Some(first) = first else {
            return false;
        };
        self.put(resource, first.lease, first.owner.as_ref());
        first.wake.notify_one();
        true
    }

    /// Grants a lease for a moment, until it is confirmed.
    fn put(&mut self, resource: &Resource, lease: LeaseDigest, owner: Option<&Owner>) {
        let Ok(token) = self.next_token() else {
            return;
        };
        self.sweep();
        let ends = after(CONFIRM_WAIT);
        let grant = Grant {
            lease,
            token,
            owner: owner.cloned(),
            ends,
            opens: ends,
            lock_delay: Duration::ZERO,
            confirmed: false,
        };
        self.grants.insert(resource.clone(), grant);
    }

    /// The last epoch (0: none), where it has no token left.
    pub(super) fn used_up(&self) -> Option<i64> {
        let Some(clock) = &self.clock else {
            return Some(0);
        };
        let next = clock.epoch.token(clock.n + 1);
        next.is_none().then_some(clock.epoch.get())
    }

    /// The epoch that counts.
    pub(super) fn epoch(&self) -> Option<Epoch> {
        self.clock.as_ref().map(|clock| clock.epoch)
    }

    fn next_token(&mut self) -> Result<Token, i64> {
        let Some(clock) = &mut self.clock else {
            return Err(0);
        };
        let token = clock.epoch.token(clock.n + 1).ok_or(clock.epoch.get())?;
        clock.n += 1;
        Ok(token)
    }

    /// The lease that is held, or keeps the resource closed.
    fn current(&mut self, resource: &Resource) -> Option<&mut Grant> {
        let open = |grant: &Grant| grant.opens <= Instant::now();
        if self.grants.get(resource).is_some_and(open) {
            self.grants.remove(resource);
        }
        self.grants.get_mut(resource)
    }

    fn held_under(&mut self, resource: &Resource, id: &LeaseId) -> Result<&mut Grant, LeaseError> {
        let lease = LeaseDigest::of(id.expose());
        self.current(resource)
            .filter(|grant| grant.lease == lease && grant.holds())
            .ok_or_else(|| LeaseError::lost(resource))
    }

    /// Forgets leases that have ended, each time their number may have doubled: memory is held
    /// for held leases only, at a constant cost per grant.
    fn sweep(&mut self) {
        if self.grants.len() >= 2 * self.swept + 16 {
            let now = Instant::now();
            self.grants.retain(|_, grant| grant.opens > now);
            self.grants.shrink_to(2 * self.grants.len());
            self.swept = self.grants.len();
        }
    }

    #[cfg(test)]
    pub(super) fn grants(&self) -> usize {
        self.grants.len()
    }

    /// Leaves so many tokens in the epoch.
    #[cfg(test)]
    pub(super) fn use_up(&mut self, left: i64) {
        if let Some(clock) = &mut self.clock {
            clock.n = Epoch::SIZE - 1 - left;
        }
    }
}

impl Grant {
    fn holds(&self) -> bool {
        self.ends > Instant::now()
    }

    /// Starts the lease's time anew.
    fn start(&mut self, resource: &Resource, id: &LeaseId, ttl: Duration) -> Lease {
        let ttl = Duration::from_millis(at_least_1_ms(ttl));
        self.ends = after(ttl);
        self.opens = after(ttl.saturating_add(self.lock_delay));
        Lease {
            resource: resource.clone(),
            id: id.clone(),
            token: self.token,
            ttl,
            signed: None,
        }
    }
}
