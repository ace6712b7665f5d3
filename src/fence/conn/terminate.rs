//! The end of a session that is out of reach, whose statement nobody waits for any more.
//!
//! 1. A connection of its own does it, beside the pool: all of the pool's may be taken by just such
//!    statements. It is opened when it is needed and closed afterwards.
//! 2. There is one at a time, however many sessions are to be ended.
//! 3. Numbers of server processes come again, and a session goes on to other transactions. It is
//!    found by the advisory lock of the very transaction that is to end, or not at all.
//! 4. Where the server knows no way, or the role may not, the connection is closed, and the statement ends by
//!    its own time limit.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    time::Duration,
};

use sqlx::{ConnectOptions, Pool};
use tokio::{sync::Mutex, time::timeout};

use crate::{
    chain::Chain,
    fence::{
        fault::Failure,
        sql::{AdvisoryLock, Backend},
    },
};

pub(super) struct Terminations<DB: Backend> {
    connection: Mutex<Option<DB::Connection>>,
    under_way: AtomicUsize,
    leaves_all: AtomicBool,
}

impl<DB: Backend> Terminations<DB> {
    pub(super) fn new() -> Self {
        Self {
            connection: Mutex::default(),
            under_way: AtomicUsize::new(0),
            leaves_all: AtomicBool::new(false),
        }
    }

    pub(super) fn leave_all(&self) {
        self.leaves_all.store(true, SeqCst);
    }

    pub(super) fn ends_any(&self) -> bool {
        !self.leaves_all.load(SeqCst)
    }

    /// Ends a session, or logs that this could not be done in time.
    pub(super) async fn terminate(&self, pool: &Pool<DB>, lock: AdvisoryLock, within: Duration) {
        if !self.ends_any() {
            return;
        }
        let ended = match timeout(within, self.end(pool, lock)).await {
            Ok(ended) => ended.map_err(Failure::from),
            Err(_) => Err(Failure::silent()),
        };
        if let Err(Failure { cause, .. }) = ended {
            tracing::error!(error = %Chain(&cause), "an abandoned statement was not ended");
        }
    }

    async fn end(&self, pool: &Pool<DB>, lock: AdvisoryLock) -> sqlx::Result<()> {
        let _last_closes = UnderWay::new(self);
        let mut kept = self.connection.lock().await;
        // Taken out: when this is dropped in the middle, nobody uses the connection again.
        let mut conn = match kept.take() {
            Some(conn) => conn,
            None => pool.connect_options().connect().await?,
        };
        DB::terminate(&mut conn, lock).await?;
        *kept = Some(conn);
        Ok(())
    }
}

/// The last one closes the connection.
struct UnderWay<'a, DB: Backend>(&'a Terminations<DB>);

impl<'a, DB: Backend> UnderWay<'a, DB> {
    fn new(all: &'a Terminations<DB>) -> Self {
        all.under_way.fetch_add(1, SeqCst);
        Self(all)
    }
}

impl<DB: Backend> Drop for UnderWay<'_, DB> {
    fn drop(&mut self) {
        if self.0.under_way.fetch_sub(1, SeqCst) == 1
            && let Ok(mut kept) = self.0.connection.try_lock()
        {
            kept.take();
        }
    }
}
