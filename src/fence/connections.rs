//! Where the fence's connections come from: the pool, by way of a few that are kept for a moment.
//!
//! 1. A connection that a write has left clean goes to the first in the line of those who wait for
//!    one, or is kept for the next. That saves the round trips which the pool makes when it takes
//!    one back and when it hands one out.
//! 2. While nothing is left in the pool, others of the application may be waiting for it. Then one
//!    goes back every ten milliseconds.
//! 3. What was not used for twenty milliseconds goes back, and what was out of the pool for a
//!    second: the pool sees to its age.

use std::{
    collections::VecDeque,
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::{Pool, pool::PoolConnection};
use sqlx_core::transaction::TransactionManager;
use tokio::{
    sync::oneshot,
    task::yield_now,
    time::{Instant, sleep, timeout, timeout_at},
};

use super::{
    database::{Backend, TransactionLimits},
    error::{AdmitError, no_answer},
    limits::{Limits, deadline},
};

/// How often others get a connection who may be waiting for one.
pub(super) const SHARE: Duration = Duration::from_millis(10);

/// How long a connection is kept for the next write.
const KEEP: Duration = Duration::from_millis(20);

/// How long it may go from write to write.
const OUT_OF_POOL: Duration = Duration::from_secs(1);

/// How long before its request a transaction may have begun.
const AHEAD: Duration = Duration::from_millis(1);

/// How long a connection may take to answer that it lives.
const ANSWER: Duration = Duration::from_secs(1);

/// The pool, what is kept of it, and who waits for it. Clones share all of it.
pub(super) struct Connections<DB: Backend>(Arc<Shared<DB>>);

pub(super) struct Shared<DB: Backend> {
    pub(super) pool: Pool<DB>,
    state: Mutex<State<DB>>,
}

pub(super) struct State<DB: Backend> {
    /// The one that was kept last is taken first.
    shelf: Vec<(Taken<DB>, Instant)>,
    /// Whether a task looks at the shelf.
    watched: bool,
    /// Nothing is on the shelf while somebody waits.
    pub(super) line: VecDeque<Waiter<DB>>,
    /// How many tasks ask the pool for connections.
    pub(super) asking: usize,
    /// How many of them may be opening one.
    pub(super) opening: u32,
    /// When others last got a connection that they may have been waiting for.
    shared: Instant,
}

pub(super) type Waiter<DB> = oneshot::Sender<Result<Taken<DB>, sqlx::Error>>;

/// A connection that was taken out of the pool.
pub(super) struct Taken<DB: Backend> {
    pub(super) conn: PoolConnection<DB>,
    since: Instant,
    pub(super) origin: Origin,
    /// Which server process it leads to; 0 where that is not known.
    pub(super) server_process: i32,
    /// The limits of the transaction that it is in already, if any.
    pub(super) begun: Option<TransactionLimits>,
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
        let state = State {
            shelf: Vec::new(),
            watched: false,
            line: VecDeque::new(),
            asking: 0,
            opening: 0,
            shared: Instant::now(),
        };
        Self(Arc::new(Shared {
            pool,
            state: Mutex::new(state),
        }))
    }

    pub(super) fn pool(&self) -> &Pool<DB> {
        &self.0.pool
    }

    /// Takes a connection that is at hand, or waits for one.
    pub(super) async fn take(&self, limits: Limits) -> Result<Taken<DB>, AdmitError> {
        if limits.pool_checks {
            return self.take_tested(limits).await;
        }
        let patience = self.0.pool.options().get_acquire_timeout();
        let until = deadline(limits.pool_wait.min(patience));
        loop {
            let turn = {
                let mut state = self.0.lock();
                if let Some(taken) = self.0.at_hand(&mut state) {
                    return Ok(taken);
                }
                let (waiter, turn) = oneshot::channel();
                state.line.push_back(waiter);
                turn
            };
            self.0.ask();
            match timeout_at(until, turn).await {
                Ok(Ok(taken)) => return taken.map_err(|error| self.refusal(error)),
                // Another runtime has ended, and with it the task that asked.
                Ok(Err(_)) => yield_now().await,
                Err(_) => return Err(self.refusal(sqlx::Error::PoolTimedOut)),
            }
        }
    }

    /// Takes a connection that the pool has tested or opened.
    pub(super) async fn take_tested(&self, limits: Limits) -> Result<Taken<DB>, AdmitError> {
        // In a task of its own, which goes on when the caller is dropped: sqlx closes a connection
        // that is dropped while it is opened or tested, and clients that come and go would keep the
        // pool empty. What nobody takes goes back to the pool.
        let acquiring = tokio::spawn(timeout(limits.pool_wait, self.0.pool.acquire()));
        Err(self.refusal(match acquiring.await {
            Ok(Ok(Ok(conn))) => return Ok(Taken::new(conn, Origin::Tested)),
            Ok(Ok(Err(error))) => error,
            Ok(Err(_)) => sqlx::Error::PoolTimedOut,
            Err(_) => sqlx::Error::PoolClosed,
        }))
    }

    fn refusal(&self, error: sqlx::Error) -> AdmitError {
        // sqlx tries to connect until the time is up. Only a pool that is full was busy.
        let opening = self.0.lock().opening;
        match error {
            sqlx::Error::PoolTimedOut if self.0.free() + opening == 0 => {
                AdmitError::Busy(Arc::new(error))
            }
            error => AdmitError::Unavailable(Arc::new(error)),
        }
    }

    /// Passes a connection on to who waits for it, keeps it for the next write, or gives it back to
    /// the pool. It is in a transaction that has just begun, or outside of any.
    pub(super) fn put_back(&self, mut taken: Taken<DB>, limits: Limits) {
        taken.origin = Origin::Kept;
        // Without a runtime it goes to the pool, too; and where the server would soon end it for
        // being idle.
        if !limits.pool_checks
            && limits.hold > 2 * KEEP
            && taken.since.elapsed() < OUT_OF_POOL
            && !self.0.pool.is_closed()
            && tokio::runtime::Handle::try_current().is_ok()
            && !self.0.is_share(&mut self.0.lock())
        {
            self.0.pass_on(taken);
        }
    }
}

impl<DB: Backend> Clone for Connections<DB> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<DB: Backend> Shared<DB> {
    pub(super) fn lock(&self) -> MutexGuard<'_, State<DB>> {
        // Nothing panics while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many connections the pool may still open.
    pub(super) fn free(&self) -> u32 {
        let most = self.pool.options().get_max_connections();
        most.saturating_sub(self.pool.size())
    }

    /// Whether it is time for others to get a connection.
    fn is_share(&self, state: &mut State<DB>) -> bool {
        let nobody_waits = self.pool.num_idle() > 0 || self.free() > 0;
        let is_share = !nobody_waits && state.shared.elapsed() >= SHARE;
        if is_share {
            state.shared = Instant::now();
        }
        is_share
    }

    fn at_hand(&self, state: &mut State<DB>) -> Option<Taken<DB>> {
        if let Some((mut taken, since)) = state.shelf.pop() {
            // Nobody has looked at the shelf while the runtime, or the process, stood still.
            let idle = since.elapsed();
            if idle > 2 * KEEP {
                taken.origin = Origin::Idle;
            }
            if idle > AHEAD {
                taken.end_begun();
            }
            return Some(taken);
        }
        if state.somebody_waits() {
            return None;
        }
        Some(Taken::new(self.pool.try_acquire()?, Origin::Idle))
    }

    /// To the first in line, or on the shelf.
    pub(super) fn pass_on(self: &Arc<Self>, mut taken: Taken<DB>) {
        let mut state = self.lock();
        while let Some(waiter) = state.line.pop_front() {
            match waiter.send(Ok(taken)) {
                Ok(()) => return,
                // It has given up.
                Err(Ok(unsent)) => taken = unsent,
                Err(Err(_)) => return,
            }
        }
        state.shelf.push((taken, Instant::now()));
        let watched = mem::replace(&mut state.watched, true);
        // A task is dropped at once where its runtime is about to end, and takes the lock then.
        drop(state);
        if !watched {
            tokio::spawn(Watching(Some(Arc::clone(self))).watch());
        }
    }
}

impl<DB: Backend> State<DB> {
    /// Forgets who has given up at the head of the line.
    pub(super) fn somebody_waits(&mut self) -> bool {
        while self
            .line
            .pop_front_if(|waiter| waiter.is_closed())
            .is_some()
        {}
        !self.line.is_empty()
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

    /// Rolls back the transaction that nobody wants, with the next message.
    pub(super) fn end_begun(&mut self) {
        if self.begun.take().is_some() {
            DB::TransactionManager::start_rollback(&mut self.conn);
        }
    }

    pub(super) fn new(conn: PoolConnection<DB>, origin: Origin) -> Self {
        Self {
            conn,
            since: Instant::now(),
            origin,
            server_process: 0,
            begun: None,
        }
    }
}

/// Nobody gets it from the pool in a transaction.
impl<DB: Backend> Drop for Taken<DB> {
    fn drop(&mut self) {
        self.end_begun();
    }
}

/// The task that gives back to the pool what nobody has taken in time.
struct Watching<DB: Backend>(Option<Arc<Shared<DB>>>);

impl<DB: Backend> Watching<DB> {
    async fn watch(mut self) {
        while let Some(shared) = &self.0 {
            sleep(SHARE / 2).await;
            let mut state = shared.lock();
            let mut given_back = vec![];
            // The oldest come first.
            let late = |(_, kept): &(_, Instant)| kept.elapsed() >= KEEP;
            while state.shelf.first().is_some_and(late)
                || (!state.shelf.is_empty() && shared.is_share(&mut state))
            {
                given_back.push(state.shelf.remove(0));
            }
            state.watched = !state.shelf.is_empty();
            let done = !state.watched;
            drop(state);
            drop(given_back);
            if done {
                self.0 = None;
            }
        }
    }
}

/// Where the task ends with its runtime, what it would have given back goes to the pool as well.
impl<DB: Backend> Drop for Watching<DB> {
    fn drop(&mut self) {
        if let Some(shared) = &self.0 {
            let mut state = shared.lock();
            state.watched = false;
            let all = mem::take(&mut state.shelf);
            drop(state);
            drop(all);
        }
    }
}
