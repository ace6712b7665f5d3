//! Acquisition of connections from the pool, each in the task that needs it, so that the pool's
//! hooks see the task-locals of the request.
//!
//! 1. If an acquisition is dropped while the connection is tested or opened, sqlx closes the
//!    connection. Clients that disconnect would then keep the pool empty. Therefore a task
//!    completes a dropped acquisition, and returns the unused connection to the pool.
//! 2. An acquisition that still waits in the pool's queue need not be completed. If it is dropped,
//!    it leaves the queue immediately.

use std::{
    io::{Error as IoError, ErrorKind},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures_util::{future::BoxFuture, task::AtomicWaker};
use sqlx::{Connection, Pool, pool::PoolConnection};
use tokio::time::{Instant, timeout};

use crate::fence::{
    fault::{Failure, Fault},
    sql::Transactions,
};

/// Maximum time for which a connection is still tested or opened after its request was dropped.
pub(super) const ORPHAN_LIFETIME: Duration = Duration::from_secs(1);

/// Minimum time from one closing of the pool's idle connections to the next.
const BETWEEN_CLOSINGS: Duration = Duration::from_secs(1);

/// The pool, and the number of this fence's acquisitions that may be opening a connection.
pub(super) struct Direct<DB: Transactions> {
    pub(super) pool: Pool<DB>,
    /// The number of acquisitions for which an [`Opening`] exists.
    openings: Arc<AtomicU32>,
    /// The time at which the idle connections were last closed.
    closed: Mutex<Option<Instant>>,
}

impl<DB: Transactions> Direct<DB> {
    pub(super) fn new(pool: Pool<DB>) -> Self {
        Self {
            pool,
            openings: Arc::default(),
            closed: Mutex::default(),
        }
    }

    /// Closes the idle connections of the pool after one session turned out to be unusable, for
    /// example because the database is read-only, or because its host is unreachable. The other
    /// sessions are usually unusable as well. The pool opens new connections when they are needed.
    pub(super) fn close_idle(&self) {
        // A database in memory exists only as long as its connections.
        if !DB::HAS_SERVER {
            return;
        }
        // No code panics while it holds the lock.
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        if closed.is_some_and(|closed| closed.elapsed() < BETWEEN_CLOSINGS) {
            return;
        }
        *closed = Some(Instant::now());
        drop(closed);
        for _ in 0..self.pool.num_idle() {
            match self.pool.try_acquire() {
                Some(mut conn) => conn.close_on_drop(),
                None => return,
            }
        }
    }

    /// Acquires a connection, and runs the pool's `test_before_acquire` and `before_acquire`.
    pub(super) async fn acquire(&self, within: Duration) -> Result<PoolConnection<DB>, Failure> {
        let has_idle = self.pool.num_idle() > 0;
        let mut acquisition = pin!(Acquisition::new(self));
        let outcome = timeout(within, acquisition.as_mut()).await;
        match outcome.unwrap_or(Err(sqlx::Error::PoolTimedOut)) {
            Ok(conn) => Ok(conn),
            // The pool was testing or opening the connection. The pool is therefore not exhausted,
            // but the database did not respond.
            Err(error) if !acquisition.queued => {
                if has_idle && matches!(error, sqlx::Error::PoolTimedOut) {
                    // An idle connection has not answered its test.
                    self.close_idle();
                }
                Err(self.unavailable(error))
            }
            Err(error) => Err(self.no_connection(error)),
        }
    }

    /// Returns the failure for a request that got no connection.
    pub(super) fn no_connection(&self, error: sqlx::Error) -> Failure {
        // The pool times out both if it is exhausted and if the database is unreachable, because
        // sqlx tries to connect until the timeout. Only an exhausted pool counts as busy.
        match error {
            sqlx::Error::PoolTimedOut if self.free() + self.openings.load(SeqCst) == 0 => {
                error.into()
            }
            error => self.unavailable(error),
        }
    }

    /// Returns the failure for a request that got no connection although the pool is not exhausted.
    fn unavailable(&self, error: sqlx::Error) -> Failure {
        let error = with_address::<DB>(&self.pool.connect_options(), error);
        Failure::from(error).with_fault(Fault::Lost)
    }

    /// Returns how many more connections the pool may open.
    pub(super) fn free(&self) -> u32 {
        let most = self.pool.options().get_max_connections();
        most.saturating_sub(self.pool.size())
    }

    /// Counts an acquisition that may have to open a connection, until the guard is dropped.
    pub(super) fn count_opening(&self) -> Option<Opening> {
        let may_open = self.pool.num_idle() == 0 && self.free() > 0;
        may_open.then(|| Opening::new(Arc::clone(&self.openings)))
    }
}

/// Adds the address of the server, without secrets, to an I/O error or a timeout of an attempt to
/// connect. Returns other errors unchanged.
pub(in crate::fence) fn with_address<DB: Transactions>(
    options: &<DB::Connection as Connection>::Options,
    error: sqlx::Error,
) -> sqlx::Error {
    let address = DB::address(options);
    sqlx::Error::Io(match error {
        sqlx::Error::Io(error) => IoError::new(error.kind(), format!("{address}: {error}")),
        sqlx::Error::PoolTimedOut => {
            let silent = format!(
                "no connection to {address} within the timeout: the server is unreachable, is \
                 starting up, or accepts no more connections"
            );
            IoError::new(ErrorKind::TimedOut, silent)
        }
        error => return error,
    })
}

/// Guard of an acquisition that may be opening a connection.
pub(super) struct Opening(Arc<AtomicU32>);

impl Opening {
    fn new(openings: Arc<AtomicU32>) -> Self {
        openings.fetch_add(1, SeqCst);
        Self(openings)
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// Acquisition from the pool that may be dropped at any time.
struct Acquisition<DB: Transactions> {
    /// The pool's future, until it has completed.
    rest: Option<BoxFuture<'static, sqlx::Result<PoolConnection<DB>>>>,
    /// Whether the pool was exhausted at the start, and has not woken this acquisition since.
    queued: bool,
    /// Whether the pool's future has been polled.
    polled_before: bool,
    /// The waker of the pool's future, if the acquisition started in the queue.
    waker: Option<Arc<QueueWaker>>,
}

/// Waker that wakes the waiting task and records the wake-up. The pool wakes a queued acquisition
/// only when it grants a permit to that acquisition.
#[derive(Default)]
struct QueueWaker {
    is_woken: AtomicBool,
    task: AtomicWaker,
}

impl Wake for QueueWaker {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, SeqCst);
        self.task.wake();
    }
}

impl<DB: Transactions> Acquisition<DB> {
    fn new(direct: &Direct<DB>) -> Self {
        // Read these values only here, at the start. If they were read later, the acquisition could
        // seem to be in the queue although its connection is being tested or opened.
        let queued = direct.free() == 0 && direct.pool.num_idle() == 0;
        let guard = direct.count_opening();
        let acquiring = direct.pool.acquire();
        let rest = async move {
            let _guard = guard;
            acquiring.await
        };
        Self {
            rest: Some(Box::pin(rest)),
            queued,
            polled_before: false,
            waker: queued.then(Arc::default),
        }
    }
}

impl<DB: Transactions> Future for Acquisition<DB> {
    type Output = sqlx::Result<PoolConnection<DB>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let is_woken = self.waker.as_ref().is_some_and(|waker| {
            waker.task.register(context.waker());
            waker.is_woken.swap(false, SeqCst)
        });
        if self.queued && self.polled_before && !is_woken {
            // The pool may grant the permit before it wakes this task. If a timeout polls this
            // future in between, do not poll the pool. If the pool's future took the permit in that
            // poll, dropping this future would close the connection.
            return Poll::Pending;
        }
        self.polled_before = true;
        let waker = self.waker.clone().map(Waker::from);
        let waker = waker.as_ref().unwrap_or(context.waker());
        let Some(rest) = &mut self.rest else {
            return Poll::Pending;
        };
        let polled = rest.as_mut().poll(&mut Context::from_waker(waker));
        match polled {
            Poll::Ready(_) => self.rest = None,
            Poll::Pending => self.queued &= !is_woken,
        }
        polled
    }
}

impl<DB: Transactions> Drop for Acquisition<DB> {
    fn drop(&mut self) {
        let Some(rest) = self.rest.take() else {
            return;
        };
        let is_woken = |waker: &Arc<QueueWaker>| waker.is_woken.load(SeqCst);
        if self.queued && !self.waker.as_ref().is_some_and(is_woken) {
            return;
        }
        // If there is no runtime, `rest` is dropped, which closes the connection.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(timeout(ORPHAN_LIFETIME, rest));
        }
    }
}
