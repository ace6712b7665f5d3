//! Connections that are reused from write to write, without running the pool's hooks.
//!
//! [`FenceBuilder::reuse_connections`](crate::FenceBuilder::reuse_connections) describes the rules.
//! They have these reasons:
//!
//! 1. Passing on a connection saves the round trips that the pool makes when a connection is
//!    returned and acquired. Tasks acquire further connections for the waiters ([`acquirer`]).
//! 2. If a connection never returned, the pool could not close it at its maximum lifetime, and
//!    other tasks of the application could wait for a connection forever.

mod acquirer;

use std::{
    collections::VecDeque,
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::oneshot,
    task::yield_now,
    time::{Instant, sleep, timeout_at},
};

use super::{CheckedOut, Origin, direct::Direct};
use crate::{
    fence::{fault::Failure, settings::Limits, sql::Transactions},
    time::after,
};

/// Interval at which a connection returns to the pool for other tasks that may be waiting for one.
const FAIRNESS_INTERVAL: Duration = Duration::from_millis(10);

/// Maximum time for which a connection is kept for the next write.
const KEEP_TIMEOUT: Duration = Duration::from_millis(20);

/// Maximum time for which a connection is reused before it returns to the pool.
const OUT_OF_POOL: Duration = Duration::from_secs(1);

/// Kept connections and the queue of waiters.
pub(super) struct Reuse<DB: Transactions> {
    direct: Arc<Direct<DB>>,
    state: Mutex<State<DB>>,
}

/// State that all clones of the fence share.
struct State<DB: Transactions> {
    /// The kept connections. The most recently kept one is taken first.
    kept: Vec<(CheckedOut<DB>, Instant)>,
    /// Whether a task watches `kept`.
    watched: bool,
    /// The waiters. While a request waits, `kept` is empty.
    queue: VecDeque<Waiter<DB>>,
    /// The number of tasks that acquire connections from the pool.
    acquirers: usize,
    /// The time at which a connection was last returned for other tasks.
    shared: Instant,
}

/// Request that waits for a connection.
type Waiter<DB> = oneshot::Sender<Result<CheckedOut<DB>, sqlx::Error>>;

impl<DB: Transactions> Reuse<DB> {
    pub(super) fn new(direct: Arc<Direct<DB>>) -> Arc<Self> {
        let state = State {
            kept: Vec::new(),
            watched: false,
            queue: VecDeque::new(),
            acquirers: 0,
            shared: Instant::now(),
        };
        Arc::new(Self {
            direct,
            state: Mutex::new(state),
        })
    }

    /// Takes an available connection, or waits for one in the queue.
    pub(super) async fn take(self: &Arc<Self>, limits: Limits) -> Result<CheckedOut<DB>, Failure> {
        // Outside of a runtime, panic before a connection is taken.
        let _runtime = Handle::current();
        let direct = &self.direct;
        let acquire_timeout = direct.pool.options().get_acquire_timeout();
        let until = after(limits.pool_timeout.min(acquire_timeout));
        loop {
            let turn = {
                let mut state = self.lock();
                if let Some(available) = self.take_available(&mut state) {
                    return Ok(available);
                }
                let (waiter, turn) = oneshot::channel();
                state.queue.push_back(waiter);
                turn
            };
            self.start_acquirer();
            match timeout_at(until, turn).await {
                Ok(Ok(taken)) => return taken.map_err(|error| direct.no_connection(error)),
                // The task that acquires connections has ended together with its runtime.
                Ok(Err(_)) => yield_now().await,
                Err(_) => return Err(direct.no_connection(sqlx::Error::PoolTimedOut)),
            }
        }
    }

    /// Passes a connection to the first waiter, keeps it for the next write, or returns it to the
    /// pool.
    pub(super) fn keep(self: &Arc<Self>, mut checked_out: CheckedOut<DB>, limits: Limits) {
        checked_out.origin = Origin::Kept;
        // Without a runtime, the connection returns to the pool. The connection also returns if the
        // idle timeout of an early transaction would soon pass.
        if limits.hold_timeout > 2 * KEEP_TIMEOUT
            && checked_out.since.elapsed() < OUT_OF_POOL
            && !self.direct.pool.is_closed()
            && Handle::try_current().is_ok()
        {
            let mut state = self.lock();
            if !self.must_share(&mut state) {
                self.pass_on(state, checked_out);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<DB>> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a connection must now return to the pool for other tasks. If so, records the
    /// time of the return.
    fn must_share(&self, state: &mut State<DB>) -> bool {
        // If the pool has room, no task waits for one of its connections.
        let has_room = self.direct.pool.num_idle() > 0 || self.direct.free() > 0;
        let must_share = !has_room && state.shared.elapsed() >= FAIRNESS_INTERVAL;
        if must_share {
            state.shared = Instant::now();
        }
        must_share
    }

    /// Takes a kept connection. If none is kept and no request waits, takes an idle connection of
    /// the pool.
    fn take_available(&self, state: &mut State<DB>) -> Option<CheckedOut<DB>> {
        if let Some((mut kept, since)) = state.kept.pop() {
            // The watching task has not run in time, because the runtime or the process was
            // suspended.
            if since.elapsed() > 2 * KEEP_TIMEOUT {
                kept.origin = Origin::Idle;
            }
            return Some(kept);
        }
        if state.has_waiters() {
            return None;
        }
        let conn = self.direct.pool.try_acquire()?;
        Some(CheckedOut::new(conn, Origin::Idle))
    }

    /// Passes a connection to the first waiter, or keeps it.
    fn pass_on(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State<DB>>,
        mut checked_out: CheckedOut<DB>,
    ) {
        while let Some(waiter) = state.queue.pop_front() {
            match waiter.send(Ok(checked_out)) {
                Ok(()) => return,
                // The waiter has timed out.
                Err(Ok(unsent)) => checked_out = unsent,
                Err(Err(_)) => return,
            }
        }
        state.kept.push((checked_out, Instant::now()));
        let watched = mem::replace(&mut state.watched, true);
        // Release the lock first. If the runtime is shutting down, `spawn` drops the task
        // immediately, and dropping the task takes the lock.
        drop(state);
        if !watched {
            tokio::spawn(KeptWatch(Some(Arc::clone(self))).watch());
        }
    }
}

impl<DB: Transactions> State<DB> {
    /// Removes waiters that have timed out from the front of the queue. Returns whether a waiter is
    /// left.
    fn has_waiters(&mut self) -> bool {
        while self
            .queue
            .pop_front_if(|waiter| waiter.is_closed())
            .is_some()
        {}
        !self.queue.is_empty()
    }
}

/// Task that returns kept connections to the pool if no write uses them in time.
struct KeptWatch<DB: Transactions>(Option<Arc<Reuse<DB>>>);

impl<DB: Transactions> KeptWatch<DB> {
    async fn watch(mut self) {
        while let Some(shared) = &self.0 {
            sleep(FAIRNESS_INTERVAL / 2).await;
            let mut state = shared.lock();
            let mut returned = vec![];
            // The oldest connections come first.
            let late = |(_, kept): &(_, Instant)| kept.elapsed() >= KEEP_TIMEOUT;
            while state.kept.first().is_some_and(late)
                || (!state.kept.is_empty() && shared.must_share(&mut state))
            {
                returned.push(state.kept.remove(0));
            }
            state.watched = !state.kept.is_empty();
            let done = !state.watched;
            drop(state);
            drop(returned);
            if done {
                self.0 = None;
            }
        }
    }
}

/// If the task ends with its runtime, all kept connections return to the pool.
impl<DB: Transactions> Drop for KeptWatch<DB> {
    fn drop(&mut self) {
        if let Some(shared) = &self.0 {
            let mut state = shared.lock();
            state.watched = false;
            let all = mem::take(&mut state.kept);
            drop(state);
            drop(all);
        }
    }
}
