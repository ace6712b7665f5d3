//! Where the fence's connections come from: the pool, by way of a few that are kept for a moment.
//!
//! 1. A connection that a write has left clean is kept for a millisecond. Under load the next write
//!    takes it from here, without the round trips that the pool makes when it takes one back and
//!    when it hands one out.
//! 2. Where somebody of this fence waits for a connection, nothing is kept: it goes to the pool,
//!    which knows who waits for longest.
//! 3. After twenty milliseconds of this a connection goes back to the pool, where others of the
//!    application may wait for one, and which sees to its age.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use sqlx::{Pool, pool::PoolConnection};
use tokio::time::{Instant, sleep, timeout};

use super::{
    database::Backend,
    error::{AdmitError, no_answer},
    limits::Limits,
};

/// How long a connection is kept for the next write.
const KEEP: Duration = Duration::from_millis(1);

/// How long a connection may go from write to write before the pool sees it again: a dozen writes
/// or so, for each of which others might have waited.
const OUT_OF_POOL: Duration = Duration::from_millis(20);

/// How long a connection may take to answer that it lives.
const ANSWER: Duration = Duration::from_secs(1);

/// The pool and what is kept of it. Clones share both.
pub(super) struct Connections<DB: Backend> {
    pool: Pool<DB>,
    kept: Arc<Kept<DB>>,
}

struct Kept<DB: Backend> {
    /// The one that was kept last is taken first.
    shelf: Mutex<Shelf<DB>>,
    /// How many wait for the pool.
    waiting: AtomicUsize,
}

struct Shelf<DB: Backend> {
    taken: Vec<(Taken<DB>, Instant)>,
    /// Whether a task clears it.
    cleared: bool,
}

/// A connection that was taken out of the pool.
pub(super) struct Taken<DB: Backend> {
    pub(super) conn: PoolConnection<DB>,
    since: Instant,
    pub(super) origin: Origin,
    /// Which server process it leads to; 0 where that is not known.
    pub(super) server_process: i32,
}

/// What is known of a connection that was taken.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Origin {
    /// It was used a moment ago.
    Kept,
    /// It was used at some time.
    Idle,
    /// The pool has just tested or opened it.
    Tested,
}

impl<DB: Backend> Connections<DB> {
    pub(super) fn new(pool: Pool<DB>) -> Self {
        Self {
            pool,
            kept: Arc::new(Kept {
                shelf: Mutex::new(Shelf {
                    taken: Vec::new(),
                    cleared: false,
                }),
                waiting: AtomicUsize::new(0),
            }),
        }
    }

    pub(super) const fn pool(&self) -> &Pool<DB> {
        &self.pool
    }

    /// Takes a connection that is at hand, or waits for one of the pool.
    pub(super) async fn take(&self, limits: Limits) -> Result<Taken<DB>, AdmitError> {
        if let Some(taken) = self.at_hand(limits) {
            return Ok(taken);
        }
        let _waiting = Waiting::new(&self.kept);
        // One that was kept before this was known to wait.
        if let Some(taken) = self.at_hand(limits) {
            return Ok(taken);
        }
        self.take_tested(limits).await
    }

    fn at_hand(&self, limits: Limits) -> Option<Taken<DB>> {
        if limits.pool_checks {
            return None;
        }
        let kept = self.kept.lock().taken.pop();
        if let Some((taken, since)) = kept {
            // Nobody has cleared the shelf while the runtime, or the process, stood still.
            let origin = if since.elapsed() < 10 * KEEP {
                Origin::Kept
            } else {
                Origin::Idle
            };
            return Some(Taken { origin, ..taken });
        }
        Some(Taken::new(self.pool.try_acquire()?, Origin::Idle))
    }

    /// Takes a connection that the pool has tested or opened.
    pub(super) async fn take_tested(&self, limits: Limits) -> Result<Taken<DB>, AdmitError> {
        // In a task of its own, which goes on when the caller is dropped: sqlx closes a connection
        // that is dropped while it is opened or tested, and clients that come and go would keep the
        // pool empty. What nobody takes goes back to the pool.
        let acquiring = tokio::spawn(timeout(limits.pool_wait, self.pool.acquire()));
        let error = match acquiring.await {
            Ok(Ok(Ok(conn))) => return Ok(Taken::new(conn, Origin::Tested)),
            Ok(Ok(Err(error))) => error,
            Ok(Err(_)) => sqlx::Error::PoolTimedOut,
            Err(_) => sqlx::Error::PoolClosed,
        };
        // sqlx tries to connect until the time is up. Only a pool that is full was busy.
        let full = self.pool.size() >= self.pool.options().get_max_connections();
        Err(match error {
            sqlx::Error::PoolTimedOut if full => AdmitError::Busy(Arc::new(error)),
            error => AdmitError::Unavailable(Arc::new(error)),
        })
    }

    /// Keeps a connection for the next write, or gives it back to the pool. It is outside of any
    /// transaction, or the end of one is under way on it.
    pub(super) fn put_back(&self, taken: Taken<DB>, limits: Limits) {
        let now = Instant::now();
        if !DB::KEPT
            || limits.pool_checks
            || now.duration_since(taken.since) > OUT_OF_POOL
            || self.pool.is_closed()
        {
            return;
        }
        // Without a runtime it goes to the pool, too.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let mut shelf = self.kept.lock();
        // Under the lock: whoever comes to wait later looks here first.
        if self.kept.waiting.load(SeqCst) > 0 {
            return;
        }
        shelf.taken.push((taken, now));
        if !mem::replace(&mut shelf.cleared, true) {
            let clearing = Clearing(Arc::clone(&self.kept));
            runtime.spawn(clearing.clear());
        }
    }
}

impl<DB: Backend> Clone for Connections<DB> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            kept: Arc::clone(&self.kept),
        }
    }
}

impl<DB: Backend> Taken<DB> {
    /// Asks which server process it leads to; that it answers shows that it lives.
    pub(super) async fn ask_server_process(&mut self) -> Result<(), AdmitError> {
        let asked = timeout(ANSWER, DB::server_process(&mut self.conn)).await;
        let answer = asked.unwrap_or_else(|_| Err(no_answer()));
        self.server_process = answer.map_err(|error| AdmitError::Unavailable(Arc::new(error)))?;
        Ok(())
    }

    fn new(conn: PoolConnection<DB>, origin: Origin) -> Self {
        Self {
            conn,
            since: Instant::now(),
            origin,
            server_process: 0,
        }
    }
}

impl<DB: Backend> Kept<DB> {
    fn lock(&self) -> MutexGuard<'_, Shelf<DB>> {
        // Nothing panics while the lock is held.
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody waits for the pool, until this is dropped.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new<DB: Backend>(kept: &'a Kept<DB>) -> Self {
        kept.waiting.fetch_add(1, SeqCst);
        Self(&kept.waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// The task that gives back to the pool what nobody has taken in time.
struct Clearing<DB: Backend>(Arc<Kept<DB>>);

impl<DB: Backend> Clearing<DB> {
    async fn clear(self) {
        loop {
            sleep(KEEP).await;
            let mut shelf = self.0.lock();
            let in_time = |(_, kept): &(Taken<DB>, Instant)| kept.elapsed() < KEEP;
            // The oldest come first.
            let late = shelf.taken.iter().position(in_time);
            let late = late.unwrap_or(shelf.taken.len());
            let given_back: Vec<_> = shelf.taken.drain(..late).collect();
            shelf.cleared = !shelf.taken.is_empty();
            let done = !shelf.cleared;
            drop(shelf);
            drop(given_back);
            if done {
                return;
            }
        }
    }
}

/// Where the task ends with its runtime, what it would have given back goes to the pool as well.
impl<DB: Backend> Drop for Clearing<DB> {
    fn drop(&mut self) {
        let mut shelf = self.0.lock();
        if shelf.cleared {
            shelf.cleared = false;
            let all = mem::take(&mut shelf.taken);
            drop(shelf);
            drop(all);
        }
    }
}
