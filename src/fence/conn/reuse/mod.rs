//! Connections that go from write to write, for who has chosen that over the pool's hooks.
//!
//! 1. A connection that a write has left clean goes to the first in the line of those who wait for
//!    one ([`line`]), or is kept for the next. That saves the round trips which the pool makes when
//!    it takes one back and when it hands one out.
//! 2. While nothing is left in the pool, others of the application may be waiting for it. Then one
//!    goes back every ten milliseconds.
//! 3. What was not used for twenty milliseconds goes back, and what was out of the pool for a
//!    second: the pool closes it when it is old.
//! 4. The next transaction begins with the COMMIT of the one before.

mod line;

use std::{
    collections::VecDeque,
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::oneshot,
    task::yield_now,
    time::{Instant, sleep, timeout_at},
};

use super::{CheckedOut, Origin, direct::Direct};
use crate::fence::{
    fault::Failure,
    settings::{Limits, deadline},
    sql::Backend,
};

/// How often others get a connection who may be waiting for one.
const FAIRNESS_INTERVAL: Duration = Duration::from_millis(10);

/// How long a connection is kept for the next write.
const SHELF_LIFE: Duration = Duration::from_millis(20);

/// How long it may go from write to write.
const OUT_OF_POOL: Duration = Duration::from_secs(1);

/// How long before its request a transaction may have begun.
const MAX_AGE: Duration = Duration::from_millis(5);

/// A transaction that began before the request that is to use it.
pub(in crate::fence) struct EarlyTransaction {
    /// It had not begun by then.
    sent: Instant,
}

impl EarlyTransaction {
    /// One that began with a message that was sent at `sent`.
    pub(in crate::fence) const fn new(sent: Instant) -> Self {
        Self { sent }
    }

    /// Whether it is young enough, however long the answer was on its way.
    pub(in crate::fence) fn serves(&self) -> bool {
        self.sent.elapsed() <= MAX_AGE
    }
}

/// The connections that are kept, and who waits for one. Clones share them.
pub(super) struct Reuse<DB: Backend>(Arc<Shared<DB>>);

struct Shared<DB: Backend> {
    direct: Arc<Direct<DB>>,
    state: Mutex<State<DB>>,
}

struct State<DB: Backend> {
    /// The one that was kept last is taken first.
    shelf: Vec<(CheckedOut<DB>, Instant)>,
    /// Whether a task looks at the shelf.
    watched: bool,
    /// Nothing is on the shelf while a request waits.
    line: VecDeque<Waiter<DB>>,
    /// How many tasks ask the pool for connections.
    acquirers: usize,
    /// When others last got a connection that they may have been waiting for.
    shared: Instant,
}

type Waiter<DB> = oneshot::Sender<Result<CheckedOut<DB>, sqlx::Error>>;

impl<DB: Backend> Reuse<DB> {
    pub(super) fn new(direct: Arc<Direct<DB>>) -> Self {
        let state = State {
            shelf: Vec::new(),
            watched: false,
            line: VecDeque::new(),
            acquirers: 0,
            shared: Instant::now(),
        };
        Self(Arc::new(Shared {
            direct,
            state: Mutex::new(state),
        }))
    }

    /// Takes a connection that is at hand, or waits for one in line.
    pub(super) async fn take(&self, limits: Limits) -> Result<CheckedOut<DB>, Failure> {
        let direct = &self.0.direct;
        let patience = direct.pool.options().get_acquire_timeout();
        let until = deadline(limits.pool_timeout.min(patience));
        loop {
            let turn = {
                let mut state = self.0.lock();
                if let Some(at_hand) = self.0.at_hand(&mut state) {
                    return Ok(at_hand);
                }
                let (waiter, turn) = oneshot::channel();
                state.line.push_back(waiter);
                turn
            };
            self.0.ask();
            match timeout_at(until, turn).await {
                Ok(Ok(taken)) => return taken.map_err(|error| direct.refusal(error)),
                // Another runtime has ended, and with it the task that asked.
                Ok(Err(_)) => yield_now().await,
                Err(_) => return Err(direct.refusal(sqlx::Error::PoolTimedOut)),
            }
        }
    }

    /// Passes a connection on to who waits for it, keeps it for the next write, or gives it back to
    /// the pool.
    pub(super) fn keep(&self, mut checked_out: CheckedOut<DB>, limits: Limits) {
        checked_out.origin = Origin::Kept;
        // Without a runtime it goes to the pool, too; and where the server would soon end it for
        // being idle.
        if limits.hold_timeout > 2 * SHELF_LIFE
            && checked_out.since.elapsed() < OUT_OF_POOL
            && !self.0.direct.pool.is_closed()
            && tokio::runtime::Handle::try_current().is_ok()
            && !self.0.is_share(&mut self.0.lock())
        {
            self.0.pass_on(checked_out);
        }
    }
}

impl<DB: Backend> Clone for Reuse<DB> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<DB: Backend> Shared<DB> {
    fn lock(&self) -> MutexGuard<'_, State<DB>> {
        // Nothing panics while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is time for others to get a connection.
    fn is_share(&self, state: &mut State<DB>) -> bool {
        let nobody_waits = self.direct.pool.num_idle() > 0 || self.direct.free() > 0;
        let is_share = !nobody_waits && state.shared.elapsed() >= FAIRNESS_INTERVAL;
        if is_share {
            state.shared = Instant::now();
        }
        is_share
    }

    fn at_hand(&self, state: &mut State<DB>) -> Option<CheckedOut<DB>> {
        if let Some((mut kept, since)) = state.shelf.pop() {
            // Nobody has looked at the shelf while the runtime, or the process, stood still.
            if since.elapsed() > 2 * SHELF_LIFE {
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

    /// To the first in line, or on the shelf.
    fn pass_on(self: &Arc<Self>, mut checked_out: CheckedOut<DB>) {
        let mut state = self.lock();
        while let Some(waiter) = state.line.pop_front() {
            match waiter.send(Ok(checked_out)) {
                Ok(()) => return,
                // It has given up.
                Err(Ok(unsent)) => checked_out = unsent,
                Err(Err(_)) => return,
            }
        }
        state.shelf.push((checked_out, Instant::now()));
        let watched = mem::replace(&mut state.watched, true);
        // A task is dropped at once where its runtime is about to end, and takes the lock then.
        drop(state);
        if !watched {
            tokio::spawn(ShelfWatch(Some(Arc::clone(self))).watch());
        }
    }
}

impl<DB: Backend> State<DB> {
    /// Forgets who has given up at the head of the line.
    fn has_waiters(&mut self) -> bool {
        while self
            .line
            .pop_front_if(|waiter| waiter.is_closed())
            .is_some()
        {}
        !self.line.is_empty()
    }
}

/// The task that gives back to the pool what nobody has taken in time.
struct ShelfWatch<DB: Backend>(Option<Arc<Shared<DB>>>);

impl<DB: Backend> ShelfWatch<DB> {
    async fn watch(mut self) {
        while let Some(shared) = &self.0 {
            sleep(FAIRNESS_INTERVAL / 2).await;
            let mut state = shared.lock();
            let mut given_back = vec![];
            // The oldest come first.
            let late = |(_, kept): &(_, Instant)| kept.elapsed() >= SHELF_LIFE;
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
impl<DB: Backend> Drop for ShelfWatch<DB> {
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
