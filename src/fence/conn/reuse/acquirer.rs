//! Acquisition of connections from the pool on behalf of the waiting requests.
//!
//! Waiting requests do not acquire connections themselves. If an acquisition is dropped, sqlx
//! closes its connection, so clients that disconnect would keep the pool empty. Instead, tasks
//! acquire connections, and pass each connection to the first waiter in the queue.

use std::{mem, pin::pin, sync::Arc};

use sqlx::pool::PoolConnection;
use tokio::time::{Instant, timeout};

use super::{FAIRNESS_INTERVAL, Reuse};
use crate::fence::{
    conn::{CheckedOut, Origin, direct::ORPHAN_LIFETIME},
    sql::Transactions,
};

/// Task that acquires connections until no request waits. It is `None` after the task has ended
/// normally.
struct Acquirer<DB: Transactions>(Option<Arc<Reuse<DB>>>);

impl<DB: Transactions> Acquirer<DB> {
    async fn run(mut self) {
        while let Some(shared) = &self.0 {
            match shared.acquire().await {
                Some(Ok(conn)) => {
                    shared.pass_on(shared.lock(), CheckedOut::new(conn, Origin::Tested));
                }
                // Each waiter has its own timeout.
                None | Some(Err(sqlx::Error::PoolTimedOut)) => {}
                Some(Err(error)) => {
                    let first = shared.lock().queue.pop_front();
                    let _ = first.map(|waiter| waiter.send(Err(error)));
                }
            }
            let mut state = shared.lock();
            if state.has_waiters() {
                drop(state);
                // The pool may now be able to open more connections, so start another task if it is
                // needed.
                shared.start_acquirer();
            } else {
                state.acquirers -= 1;
                drop(state);
                self.0 = None;
            }
        }
    }
}

impl<DB: Transactions> Reuse<DB> {
    /// Starts another task that acquires connections, if there are waiters and too few such tasks.
    /// While a request waits, at least one task runs. There are at most as many tasks as waiters
    /// and, above one, at most as many tasks as connections that the pool may still open.
    pub(super) fn start_acquirer(self: &Arc<Self>) {
        let free = self.direct.free() as usize;
        let mut state = self.lock();
        let is_needed = state.has_waiters() && state.acquirers < free.clamp(1, state.queue.len());
        state.acquirers += usize::from(is_needed);
        drop(state);
        if is_needed {
            tokio::spawn(Acquirer(Some(Arc::clone(self))).run());
        }
    }

    /// Waits for a connection of the pool. Returns `None` if the queue has been empty for longer
    /// than [`ORPHAN_LIFETIME`], or if the pool is closed.
    async fn acquire(self: &Arc<Self>) -> Option<sqlx::Result<PoolConnection<DB>>> {
        let pool = &self.direct.pool;
        let _guard = self.direct.count_opening();
        let mut acquiring = pin!(pool.acquire());
        // The last time at which a request waited.
        let mut wanted = Instant::now();
        loop {
            if let Ok(acquired) = timeout(FAIRNESS_INTERVAL, acquiring.as_mut()).await {
                return Some(acquired);
            }
            // The pool may be failing to open a connection, while another connection has been
            // returned.
            let waits = self.lock().has_waiters();
            match waits.then(|| pool.try_acquire()).flatten() {
                Some(conn) => self.pass_on(self.lock(), CheckedOut::new(conn, Origin::Idle)),
                None if waits => wanted = Instant::now(),
                None if wanted.elapsed() > ORPHAN_LIFETIME || pool.is_closed() => return None,
                None => {}
            }
        }
    }
}

/// If the task ends with its runtime, the waiters are dropped from the queue. Their requests enter
/// the queue again and start another task.
impl<DB: Transactions> Drop for Acquirer<DB> {
    fn drop(&mut self) {
        if let Some(shared) = &self.0 {
            let mut state = shared.lock();
            state.acquirers -= 1;
            let queue = mem::take(&mut state.queue);
            drop(state);
            drop(queue);
        }
    }
}
