//! A connection from the pool, asked for in the task that needs it: what the pool's hooks read from
//! a task-local is the request's own.
//!
//! 1. sqlx closes a connection when its acquisition is dropped while it is tested or opened. Clients
//!    that come and go would keep the pool empty, so a task sees the rest of a dropped acquisition
//!    through, and the connection goes to the pool unused.
//! 2. An acquisition that only waits for its turn has nothing to lose, and leaves the pool's line at
//!    once.

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
use sqlx::{Pool, pool::PoolConnection};
use tokio::time::{Instant, timeout};

use crate::fence::{
    fault::{Failure, Fault},
    sql::Backend,
};

/// How long a connection goes on being tested or opened that nobody waits for.
pub(super) const ORPHAN_LIFETIME: Duration = Duration::from_secs(1);

/// How often the idle connections of the pool are closed at most, because one of its sessions was of no use.
const BETWEEN_CLOSINGS: Duration = Duration::from_secs(1);

/// The pool, and how many acquisitions of this fence may be opening a connection.
pub(super) struct Direct<DB: Backend> {
    pub(super) pool: Pool<DB>,
    opening: Arc<AtomicU32>,
    /// When the idle connections were last closed.
    closed: Mutex<Option<Instant>>,
}

impl<DB: Backend> Direct<DB> {
    pub(super) fn new(pool: Pool<DB>) -> Self {
        Self {
            pool,
            opening: Arc::default(),
            closed: Mutex::default(),
        }
    }

    /// Closes the idle connections, after a session has turned out to be of no use: those that were opened before are
    /// mostly like it, read-only for example since the database was. The pool opens others when they are needed.
    pub(super) fn close_idle(&self) {
        // Nothing panics while the lock is held.
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

    /// Takes a connection with all that the pool does then: `test_before_acquire`, `before_acquire`.
    pub(super) async fn acquire(&self, within: Duration) -> Result<PoolConnection<DB>, Failure> {
        let mut acquisition = pin!(Acquisition::new(self));
        let outcome = timeout(within, acquisition.as_mut()).await;
        match outcome.unwrap_or(Err(sqlx::Error::PoolTimedOut)) {
            Ok(conn) => Ok(conn),
            // It was tested or opened in vain: the pool is not busy, but the database is away.
            Err(error) if !acquisition.in_line => Err(self.unavailable(error)),
            Err(error) => Err(self.refusal(error)),
        }
    }

    /// Why there was no connection for one who has waited for its turn.
    pub(super) fn refusal(&self, error: sqlx::Error) -> Failure {
        // sqlx tries to connect until the time is up. Only a pool that is full was busy.
        match error {
            sqlx::Error::PoolTimedOut if self.free() + self.opening.load(SeqCst) == 0 => {
                error.into()
            }
            error => self.unavailable(error),
        }
    }

    /// There was no connection, and not since the pool was full. The error names the server, as far as
    /// the options do so in public.
    fn unavailable(&self, error: sqlx::Error) -> Failure {
        let address = DB::address(&self.pool.connect_options());
        let cause = match error {
            sqlx::Error::Io(error) => IoError::new(error.kind(), format!("{address}: {error}")),
            sqlx::Error::PoolTimedOut => {
                let silent = format!("no connection to {address} came about in time");
                IoError::new(ErrorKind::TimedOut, silent)
            }
            error => return Failure::from(error).with_fault(Fault::Lost),
        };
        Failure::from(sqlx::Error::Io(cause))
    }

    /// How many connections the pool may still open.
    pub(super) fn free(&self) -> u32 {
        let most = self.pool.options().get_max_connections();
        most.saturating_sub(self.pool.size())
    }

    /// Counts an acquisition that may have to open a connection.
    pub(super) fn opening(&self) -> Option<Opening> {
        let may_open = self.pool.num_idle() == 0 && self.free() > 0;
        may_open.then(|| Opening::new(Arc::clone(&self.opening)))
    }
}

/// The pool may be opening a connection, until this is dropped.
pub(super) struct Opening(Arc<AtomicU32>);

impl Opening {
    fn new(count: Arc<AtomicU32>) -> Self {
        count.fetch_add(1, SeqCst);
        Self(count)
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// The pool's own acquisition, which may be dropped at any moment.
struct Acquisition<DB: Backend> {
    rest: Option<BoxFuture<'static, sqlx::Result<PoolConnection<DB>>>>,
    /// Whether the pool had nothing to give, and has given nothing since.
    in_line: bool,
    /// Whether the pool was asked.
    asked: bool,
    waker: Arc<LineWaker>,
}

/// Wakes who waits, and remembers it. In the pool's line nobody is woken before its turn.
#[derive(Default)]
struct LineWaker {
    has_come: AtomicBool,
    task: AtomicWaker,
}

impl Wake for LineWaker {
    fn wake(self: Arc<Self>) {
        self.has_come.store(true, SeqCst);
        self.task.wake();
    }
}

impl<DB: Backend> Acquisition<DB> {
    fn new(direct: &Direct<DB>) -> Self {
        // Looked for once: what has changed in between would make it seem in line while it is tested or opened.
        let in_line = direct.free() == 0 && direct.pool.num_idle() == 0;
        let opening = direct.opening();
        let acquiring = direct.pool.acquire();
        let rest = async move {
            let _opening = opening;
            acquiring.await
        };
        Self {
            rest: Some(Box::pin(rest)),
            in_line,
            asked: false,
            waker: Arc::default(),
        }
    }
}

impl<DB: Backend> Future for Acquisition<DB> {
    type Output = sqlx::Result<PoolConnection<DB>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.waker.task.register(context.waker());
        let has_come = self.waker.has_come.swap(false, SeqCst);
        if self.in_line && self.asked && !has_come {
            // Its turn may have come already, and the waker not yet: who is polled in between, for a time limit that
            // has run out, must not leave the line unseen.
            return Poll::Pending;
        }
        self.asked = true;
        let waker = Waker::from(Arc::clone(&self.waker));
        let Some(rest) = &mut self.rest else {
            return Poll::Pending;
        };
        let polled = rest.as_mut().poll(&mut Context::from_waker(&waker));
        match polled {
            Poll::Ready(_) => self.rest = None,
            Poll::Pending => self.in_line &= !has_come,
        }
        polled
    }
}

impl<DB: Backend> Drop for Acquisition<DB> {
    fn drop(&mut self) {
        let Some(rest) = self.rest.take() else {
            return;
        };
        if self.in_line && !self.waker.has_come.load(SeqCst) {
            return;
        }
        // Without a runtime there is no pool either.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(timeout(ORPHAN_LIFETIME, rest));
        }
    }
}
