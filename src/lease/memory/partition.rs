//! One partition: its token counter, its leases, and the queues for them.
//!
//! The steps are those of the Redis scripts, under a mutex instead of in a script. Each notes in `calls` which
//! requests have to ask.

#[cfg(test)]
mod tests;

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
        time::after,
    },
    token::{Resource, Token},
};

/// How long a waiter may take to confirm the lease that was granted to it.
const CONFIRM_WAIT: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Partition {
    counter: Option<Counter>,
    grants: HashMap<Resource, Grant>,
    queues: HashMap<Resource, VecDeque<Waiter>>,
    /// The tickets of the requests that have to ask.
    pub(super) calls: Vec<i64>,
    /// How many grants there were after the last sweep.
    swept: usize,
}

/// The token that was granted last is `epoch.token(n)`.
struct Counter {
    epoch: Epoch,
    n: i64,
}

struct Grant {
    lease: LeaseDigest,
    /// The request that it was granted to; `None` if several have asked under its lease id.
    ticket: Option<i64>,
    token: Token,
    owner: Option<Owner>,
    granted_at: SystemTime,
    /// When the lease ends.
    ends: Instant,
    /// When the resource is free again, if the lease ends by time.
    opens: Instant,
    lock_delay: Duration,
}

struct Waiter {
    lease: LeaseDigest,
    ticket: i64,
    owner: Option<Owner>,
}

impl Partition {
    /// Grants a lease, joins the queue, or says what is in the way.
    pub(super) fn acquire(&mut self, resource: &Resource, ask: &Ask, waits: Waits<'_>) -> Reply {
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
            // New, a repeated request, or the confirmation of what was granted to the first in the queue.
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
            Waits::Yes { queued, .. } => self.join(resource, ask, queued, left),
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
            // The counter does not follow: if the resource has seen a token from elsewhere, this
            // concerns this lease alone.
            if let Some(grant) = self.current(resource) {
                grant.token = next.max(lowest);
            }
        }
        if let Some(grant) = self.current(resource) {
            grant.start(renewal.ttl);
        }
        self.granted(resource, renewal.ttl)
    }

    /// The answer for the lease that is held, whose end the first in the queue has to learn.
    fn granted(&mut self, resource: &Resource, ttl: Duration) -> Reply {
        self.call_first(resource);
        let (Some(counter), Some(grant)) = (&self.counter, self.grants.get(resource)) else {
            return Reply::Again;
        };
        Reply::Granted(Granted::new(grant.token, ttl).counted(counter.epoch, counter.n))
    }

    /// Ends a lease; then the next in the queue has it.
    pub(super) fn end(&mut self, resource: &Resource, end: &End) -> Reply {
        if let End::Abandon { ticket, .. } = end {
            self.leave(resource, *ticket);
        }
        let ends = |grant: &mut Grant| match end {
            End::Release(lease) => grant.lease == *lease && grant.holds(),
            End::Abandon { lease, ticket } => {
                grant.lease == *lease && grant.ticket == Some(*ticket)
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
            // The first in the queue begins an epoch.
            self.call_first(resource);
        }
        Reply::Ended
    }

    /// Leaves the queue.
    fn leave(&mut self, resource: &Resource, ticket: i64) {
        if let Some(queue) = self.queues.get_mut(resource) {
            queue.retain(|waiter| waiter.ticket != ticket);
            if queue.is_empty() {
                self.queues.remove(resource);
            }
        }
        // The waiter that is first now may not know when the lease ends, or that it has ended.
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

    /// The leases that are held on resources whose names come after this one, in order.
    pub(super) fn list(&mut self, after: &str) -> Vec<(Resource, Held)> {
        let names = self.grants.keys().filter(|name| name.as_str() > after);
        let mut names: Vec<Resource> = names.cloned().collect();
        names.sort_unstable();
        let held = |name: Resource| self.inspect(&name).map(|held| (name, held));
        names.into_iter().filter_map(held).collect()
    }

    /// Begins an epoch, unless another request was faster.
    pub(super) fn begin_epoch(&mut self, epoch: Epoch) -> bool {
        let begins = self.used_up().is_some_and(|last| last < epoch.get());
        if begins {
            self.counter = Some(Counter { epoch, n: 0 });
        }
        begins
    }

    /// Ends an epoch below the highest one and number that are known, with its leases: their tokens are stale.
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

    /// Has the first in the queue ask.
    fn call_first(&mut self, resource: &Resource) {
        if let Some(first) = self.queues.get(resource).and_then(VecDeque::front) {
            self.calls.push(first.ticket);
        }
    }

    /// Grants a free lease to the first in the queue, which confirms it by asking.
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

    /// Grants a lease for a moment, until it is confirmed.
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

    /// The last epoch (0: none), where it has no token left.
    pub(super) fn used_up(&self) -> Option<i64> {
        let Some(counter) = &self.counter else {
            return Some(0);
        };
        let next = counter.epoch.token(counter.n + 1);
        next.is_none().then_some(counter.epoch.get())
    }

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

    /// The lease that is held, or keeps the resource closed.
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
        if let Some(counter) = &mut self.counter {
            counter.n = Epoch::SIZE - 1 - left;
        }
    }
}

impl Grant {
    fn holds(&self) -> bool {
        self.ends > Instant::now()
    }

    /// Starts the lease's time anew.
    fn start(&mut self, ttl: Duration) {
        self.ends = after(ttl);
        self.opens = after(ttl.saturating_add(self.lock_delay));
    }
}
