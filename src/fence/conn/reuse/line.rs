//! Those who wait for a connection ask the pool together.
//!
//! None of them does so itself: sqlx closes a connection whose acquisition is given up, and clients
//! that come and go would keep the pool empty. So tasks ask on their behalf, and what comes goes to
//! the first in line.

use std::{mem, pin::pin, sync::Arc};

use sqlx::pool::PoolConnection;
use tokio::time::{Instant, timeout};

use super::{FAIRNESS_INTERVAL, Shared};
use crate::fence::{
    conn::{CheckedOut, Origin, direct::ORPHAN_LIFETIME},
    sql::Backend,
};

/// A task that asks the pool, until nobody waits any more.
struct Acquirer<DB: Backend>(Option<Arc<Shared<DB>>>);

impl<DB: Backend> Acquirer<DB> {
    async fn ask(mut self) {
        while let Some(shared) = &self.0 {
            match shared.acquire().await {
                Some(Ok(conn)) => shared.pass_on(CheckedOut::new(conn, Origin::Tested)),
                // Each has a limit of its own.
                None | Some(Err(sqlx::Error::PoolTimedOut)) => {}
                Some(Err(error)) => {
                    let first = shared.lock().line.pop_front();
                    let _ = first.map(|waiter| waiter.send(Err(error)));
                }
            }
            let mut state = shared.lock();
            if state.has_waiters() {
                drop(state);
                // Others may be opened by now.
                shared.ask();
            } else {
                state.acquirers -= 1;
                drop(state);
                self.0 = None;
            }
        }
    }
}

impl<DB: Backend> Shared<DB> {
    /// Sees to it that the pool is asked on behalf of those in line: once, or as often as it may
    /// open connections.
    pub(super) fn ask(self: &Arc<Self>) {
        let free = self.direct.free() as usize;
        let mut state = self.lock();
        let more = state.has_waiters() && state.acquirers < free.clamp(1, state.line.len());
        state.acquirers += usize::from(more);
        drop(state);
        if more {
            tokio::spawn(Acquirer(Some(Arc::clone(self))).ask());
        }
    }

    /// Waits for a connection of the pool; `None` when nobody has wanted it for a while.
    async fn acquire(self: &Arc<Self>) -> Option<sqlx::Result<PoolConnection<DB>>> {
        let pool = &self.direct.pool;
        let _opening = self.direct.opening();
        let mut acquiring = pin!(pool.acquire());
        let mut wanted = Instant::now();
        loop {
            if let Ok(acquired) = timeout(FAIRNESS_INTERVAL, acquiring.as_mut()).await {
                return Some(acquired);
            }
            // It may be opening one, in vain, while another one has come back.
            let waits = self.lock().has_waiters();
            match waits.then(|| pool.try_acquire()).flatten() {
                Some(conn) => self.pass_on(CheckedOut::new(conn, Origin::Idle)),
                None if waits => wanted = Instant::now(),
                None if wanted.elapsed() > ORPHAN_LIFETIME || pool.is_closed() => return None,
                None => {}
            }
        }
    }
}

/// Where the task ends with its runtime, those in line get in line again, and ask by themselves.
impl<DB: Backend> Drop for Acquirer<DB> {
    fn drop(&mut self) {
        if let Some(shared) = &self.0 {
            let mut state = shared.lock();
            state.acquirers -= 1;
            let line = mem::take(&mut state.line);
            drop(state);
            drop(line);
        }
    }
}
