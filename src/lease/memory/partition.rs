//! Partition with its token counter, its leases, and their queues.
//!
//! The steps are the same as in the Redis scripts, and run under a mutex. Each step adds the
//! requests that must retry to `calls`.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use crate::{
    announce::LeaseDigest,
    epochs::Epoch,
    lease::{
        Held, Owner,
        backend::{Ask, BlankCounter, End, Granted, Renewal, Reply, Waits},
    },
    time::after,
    token::{Resource, Token},
};

/// Time within which a waiter must confirm a lease that was granted to it.
const CONFIRM_WAIT: Duration = Duration::from_secs(1);

/// Partition, on which one step runs at a time.
#[derive(Default)]
pub(super) struct Partition {
    counter: Option<Counter>,
    grants: HashMap<Resource, Grant>,
    queues: HashMap<Resource, VecDeque<Waiter>>,
    /// The tickets of the requests that must retry.
    pub(super) calls: Vec<i64>,
    /// The number of grants after the last sweep.
    swept: usize,
}

/// Token counter. The last granted token is `epoch.token(n)`.
struct Counter {
    epoch: Epoch,
    n: i64,
}

struct Grant {
    lease: LeaseDigest,
    /// The request to which the lease was granted, or `None` if several requests have used its
    /// lease id, or the lease was renewed.
    ticket: Option<i64>,
    token: Token,
    owner: Option<Owner>,
    granted_at: SystemTime,
    /// When the lease expires.
    ends: Instant,
    /// When the resource becomes free if the lease expires.
    opens: Instant,
    lock_delay: Duration,
}

struct Waiter {
    lease: LeaseDigest,
    ticket: i64,
    owner: Option<Owner>,
}

impl Partition {
    /// Grants a lease, joins the queue, or reports how long the resource stays blocked.
    pub(super) fn acquire(&mut self, resource: &Resource, ask: &Ask, waits: &Waits) -> Reply {
        if self.current(resource).is_none() {
            if let Some(last) = self.used_up() {
                return Reply::NeedsEpoch(BlankCounter::new(last, ""));
            }
            if !self.hand_over(resource) {
                self.put(resource, ask.lease.clone(), ask.ticket, ask.owner.as_ref());
            }
        }
        let Some(grant) = self.current(resource) else {
            return Reply::Again;
        };
        if grant.lease == ask.lease && grant.holds() {
            // This is a new grant, a repeated request, or the confirmation of a lease that was
            // granted to a waiter.
            grant.ticket = grant.ticket.filter(|ticket| *ticket == ask.ticket);
            if grant.owner.is_none() {
                grant.owner.clone_from(&ask.owner);
            }
            grant.lock_delay = ask.lock_delay;
            grant.start(ask.ttl);
            return self.granted(resource, ask.ttl);
        }
        let left = grant.opens.saturating_duration_since(Instant::now());
        match waits {
            Waits::Yes { queued, .. } => self.join(resource, ask, *queued, left),
            Waits::No => Reply::Held { left },
            Waits::Leaves => {
                self.leave(resource, ask.ticket);
                Reply::Held { left }
            }
        }
    }

    fn join(&mut self, resource: &Resource, ask: &Ask, queued: bool, left: Duration) -> Reply {
        let queue = self.queues.entry(resource.clone()).or_default();
        let waiter = queue.iter_mut().find(|waiter| waiter.lease == ask.lease);
        let joined = waiter.is_none();
        match waiter {
            Some(waiter) if waiter.ticket == ask.ticket => {}
            Some(_) if queued => return Reply::Displaced,
            Some(waiter) => waiter.ticket = ask.ticket,
            None => queue.push_back(Waiter {
                lease: ask.lease.clone(),
                ticket: ask.ticket,
                owner: ask.owner.clone(),
            }),
        }
        Reply::Queued { left, joined }
    }

    /// Renews a lease, with its token or with a new one.
    pub(super) fn renew(&mut self, resource: &Resource, renewal: &Renewal) -> Reply {
        let Some(grant) = self.held_under(resource, &renewal.lease) else {
            return Reply::Lost;
        };
        let token = grant.token;
        let mut lowest = renewal.at_least.unwrap_or(token);
        if renewal.new_token {
            let Ok(next) = Token::new(token.get() + 1) else {
                return Reply::Exhausted(token.get());
            };
            lowest = lowest.max(next);
        }
        if token < lowest {
            let next = match self.next_token() {
                Ok(next) => next,
                Err(last) => return Reply::NeedsEpoch(BlankCounter::new(last, "")),
            };
            // The counter is not raised to `lowest`, because that token concerns only this lease.
            if let Some(grant) = self.current(resource) {
                grant.token = next.max(lowest);
            }
        }
        if let Some(grant) = self.current(resource) {
            // The client has the lease, so the cancellation of its request does not release it.
            grant.ticket = None;
            grant.start(renewal.ttl);
        }
        self.granted(resource, renewal.ttl)
    }

    /// Returns the reply for a held lease, and notifies the first request in the queue of the
    /// lease's new expiry.
    fn granted(&mut self, resource: &Resource, ttl: Duration) -> Reply {
        self.call_first(resource);
        let (Some(counter), Some(grant)) = (&self.counter, self.grants.get(resource)) else {
            return Reply::Again;
        };
        Reply::Granted(Granted::new(grant.token, ttl).counted(counter.epoch, counter.n))
    }

    /// Releases, abandons or breaks a lease, and grants the resource to the next request in the
    /// queue.
    pub(super) fn end(&mut self, resource: &Resource, end: &End) -> Reply {
        if let End::Abandon { ticket, .. } = end {
            self.leave(resource, *ticket);
        }
        let ends = |grant: &mut Grant| match end {
            End::Release(lease) => grant.lease == *lease && grant.holds(),
            End::Abandon { lease, ticket } => {
                grant.lease == *lease && grant.ticket == Some(*ticket) && grant.holds()
            }
            End::Break(seen) => seen.is_none_or(|seen| grant.token == seen),
        };
        if !self.current(resource).is_some_and(ends) {
            return Reply::Lost;
        }
        self.grants.remove(resource);
        if self.used_up().is_none() {
            self.hand_over(resource);
        } else {
            // No token is left, so the first request in the queue begins an epoch.
            self.call_first(resource);
        }
        Reply::Ended
    }

    /// Removes a request from the queue.
    fn leave(&mut self, resource: &Resource, ticket: i64) {
        if let Some(queue) = self.queues.get_mut(resource) {
            queue.retain(|waiter| waiter.ticket != ticket);
            if queue.is_empty() {
                self.queues.remove(resource);
            }
        }
        // The new first request may not have been notified of the time at which the lease expires,
        // or that the lease has ended.
        self.call_first(resource);
    }

    pub(super) fn inspect(&mut self, resource: &Resource) -> Option<Held> {
        let waiters = self.queues.get(resource).map_or(0, VecDeque::len) as u64;
        let grant = self.current(resource).filter(|grant| grant.holds())?;
        Some(Held {
            token: grant.token,
            owner: grant.owner.clone(),
            ttl: grant.ends.saturating_duration_since(Instant::now()),
            waiters,
            granted_at: Some(grant.granted_at),
        })
    }

    /// Returns the names of the resources with held leases, in no particular order.
    pub(super) fn held(&self) -> impl Iterator<Item = &Resource> {
        let held = self.grants.iter().filter(|(_, grant)| grant.holds());
        held.map(|(name, _)| name)
    }

    /// Begins an epoch, unless another request has begun one in the meantime.
    pub(super) fn begin_epoch(&mut self, epoch: Epoch) -> bool {
        let begins = self.used_up().is_some_and(|last| last < epoch.get());
        if begins {
            self.counter = Some(Counter { epoch, n: 0 });
        }
        begins
    }

    /// If `highest` is above the counter, ends the epoch and revokes all its leases, because their
    /// tokens are stale.
    pub(super) fn end_epoch(&mut self, highest: (i64, i64)) {
        let Some(counter) = &mut self.counter else {
            return;
        };
        let Ok(epoch) = Epoch::new(highest.0) else {
            return;
        };
        if (counter.epoch.get(), counter.n) < highest {
            *counter = Counter {
                epoch,
                n: highest.1,
            };
            self.grants.clear();
            let firsts = self.queues.values().filter_map(VecDeque::front);
            self.calls.extend(firsts.map(|first| first.ticket));
        }
    }

    /// Makes the first request in the queue retry.
    fn call_first(&mut self, resource: &Resource) {
        if let Some(first) = self.queues.get(resource).and_then(VecDeque::front) {
            self.calls.push(first.ticket);
        }
    }

    /// Grants a free lease to the first request in the queue, which must confirm it with a retry.
    /// Returns false if no request is in the queue.
    fn hand_over(&mut self, resource: &Resource) -> bool {
        let Some(queue) = self.queues.get_mut(resource) else {
            return false;
        };
        let first = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(resource);
        }
        let Some(first) = first else {
            return false;
        };
        self.put(resource, first.lease, first.ticket, first.owner.as_ref());
        self.calls.push(first.ticket);
        true
    }

    /// Grants a lease that expires after [`CONFIRM_WAIT`] unless it is confirmed.
    fn put(&mut self, resource: &Resource, lease: LeaseDigest, ticket: i64, owner: Option<&Owner>) {
        let Ok(token) = self.next_token() else {
            return;
        };
        self.sweep();
        let ends = after(CONFIRM_WAIT);
        let grant = Grant {
            lease,
            ticket: Some(ticket),
            token,
            owner: owner.cloned(),
            granted_at: SystemTime::now(),
            ends,
            opens: ends,
            lock_delay: Duration::ZERO,
        };
        self.grants.insert(resource.clone(), grant);
    }

    /// If an epoch must begin, returns the last epoch, which has no token left, or 0 if no epoch
    /// has begun.
    pub(super) fn used_up(&self) -> Option<i64> {
        let Some(counter) = &self.counter else {
            return Some(0);
        };
        let next = counter.epoch.token(counter.n + 1);
        next.is_none().then_some(counter.epoch.get())
    }

    /// Takes the next token. If an epoch must begin first, returns the last epoch as the error.
    fn next_token(&mut self) -> Result<Token, i64> {
        let Some(counter) = &mut self.counter else {
            return Err(0);
        };
        let token = counter
            .epoch
            .token(counter.n + 1)
            .ok_or(counter.epoch.get())?;
        counter.n += 1;
        Ok(token)
    }

    /// Returns the lease that is held, or whose lock delay blocks the resource.
    fn current(&mut self, resource: &Resource) -> Option<&mut Grant> {
        let open = |grant: &Grant| grant.opens <= Instant::now();
        if self.grants.get(resource).is_some_and(open) {
            self.grants.remove(resource);
        }
        self.grants.get_mut(resource)
    }

    fn held_under(&mut self, resource: &Resource, lease: &LeaseDigest) -> Option<&mut Grant> {
        let grant = self.current(resource);
        grant.filter(|grant| grant.lease == *lease && grant.holds())
    }

    /// Removes leases that have ended, whenever the number of leases has about doubled since the
    /// last sweep. Memory use therefore stays proportional to the held leases, at a constant cost
    /// per grant.
    fn sweep(&mut self) {
        if self.grants.len() >= 2 * self.swept + 16 {
            let now = Instant::now();
            self.grants.retain(|_, grant| grant.opens > now);
            self.grants.shrink_to(2 * self.grants.len());
            self.swept = self.grants.len();
        }
    }

    /// Returns how many grants and queues are in memory.
    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        self.grants.len() + self.queues.len()
    }

    /// Uses up all tokens of the epoch except the last `left`.
    #[cfg(test)]
    pub(super) fn use_up(&mut self, left: i64) {
        if let Some(counter) = &mut self.counter {
            counter.n = Epoch::SIZE - 1 - left;
        }
    }
}

impl Grant {
    /// Returns whether the lease is held, and not in its lock delay.
    fn holds(&self) -> bool {
        self.ends > Instant::now()
    }

    /// Restarts the lease's TTL.
    fn start(&mut self, ttl: Duration) {
        self.ends = after(ttl);
        self.opens = after(ttl.saturating_add(self.lock_delay));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epoch_begins_once_and_not_during_another() {
        let epoch = |number| Epoch::new(number).unwrap();
        let mut partition = Partition::default();
        assert!(partition.begin_epoch(epoch(1)));
        partition.use_up(0);
        assert!(!partition.begin_epoch(epoch(1)));
        assert!(partition.begin_epoch(epoch(3)));
        assert!(!partition.begin_epoch(epoch(2)) && !partition.begin_epoch(epoch(4)));
        assert_eq!(partition.next_token().ok(), epoch(3).token(1));
        // A token that the counter itself has reached does not end the epoch.
        partition.end_epoch((3, 1));
        assert_eq!(partition.next_token().ok(), epoch(3).token(2));
        partition.end_epoch((4, 7));
        assert_eq!(partition.next_token().ok(), epoch(4).token(8));
    }
}
