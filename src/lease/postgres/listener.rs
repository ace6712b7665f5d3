//! The connection on which a process hears of its turns: one for all its waiters, beside the pool.
//!
//! 1. Its session is registered in `tower_fence.listeners`, under a random number that is also a part of the channel's name: a
//!    role that cannot read the table can neither learn the channel nor flood it. When the session has ended, every
//!    waiter with its number is passed over.
//! 2. Every two seconds the process looks which of the resources that are waited for are open, on a connection of the
//!    pool, and has the look send a notification. So a line goes on whose first has died or was frozen, and a connection
//!    that has died in silence is noticed.
//! 3. A notification is a hint: it wakes a waiter, which asks the database. After each one the task gives way, so that
//!    a flood of them stops no other task.
//! 4. When it is lost, it is made again with a number of its own, and every waiter asks again.
//! 5. The task that listens is one of the runtime in which somebody has waited first. Where that ends, those who wait in
//!    another one ask again, and begin it there.

use std::{
    io::{Error as IoError, ErrorKind},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;
use sqlx::{
    AssertSqlSafe, Executor,
    postgres::{PgConnectOptions, PgListener, PgPoolOptions},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::yield_now,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{functions::Functions, waiters::Waiters};
use crate::{chain::Chain, lease::LeaseError};

/// How often to look whether a line stands still, while there are waiters.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

type Answer = oneshot::Sender<Result<i64, LeaseError>>;

/// What makes this process listen. Clones share one connection, which is closed with the last of them.
#[derive(Clone)]
pub(super) struct Listener {
    functions: Functions,
    waiters: Arc<Waiters>,
    options: Option<PgConnectOptions>,
    /// Leads to the task that listens, from the first waiter on.
    requests: Arc<Mutex<Option<mpsc::UnboundedSender<Answer>>>>,
}

impl Listener {
    /// Listens with these options; without, as the pool connects.
    pub(super) fn new(
        functions: Functions,
        waiters: Arc<Waiters>,
        options: Option<PgConnectOptions>,
    ) -> Self {
        Self {
            functions,
            waiters,
            options,
            requests: Arc::default(),
        }
    }

    /// Whether there can be a session that listens. A pooler that gives each transaction a server of its own
    /// lets none.
    pub(super) fn is_possible(&self) -> bool {
        self.options().is_some()
    }

    fn options(&self) -> Option<PgConnectOptions> {
        let own = self.options.clone();
        own.or_else(|| self.functions.database.session_options())
    }

    /// Makes sure that this process listens, and returns the number of its listener.
    pub(super) async fn listen(&self) -> Result<i64, LeaseError> {
        loop {
            let (answer, answered) = oneshot::channel();
            let _ = self.requests().send(answer);
            match answered.await {
                Ok(listens) => return listens,
                // The task ends, with the runtime in which it was spawned.
                Err(_) => yield_now().await,
            }
        }
    }

    /// Leads to the task that listens, which is begun where none runs.
    fn requests(&self) -> mpsc::UnboundedSender<Answer> {
        // Nothing panics while the lock is held.
        let running = self.requests.lock();
        let mut running = running.unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = running.as_ref().filter(|running| !running.is_closed()) {
            return running.clone();
        }
        let (requests, received) = mpsc::unbounded_channel();
        *running = Some(requests.clone());
        // A runtime that is about to end drops a task at once.
        drop(running);
        let task = Task {
            options: self.options().unwrap_or_default(),
            functions: self.functions.clone(),
            waiters: Arc::downgrade(&self.waiters),
            within: self.functions.database.answer_wait(),
            requests: received,
        };
        tokio::spawn(task.run());
        requests
    }
}

/// The task that listens. When it ends every waiter asks again.
struct Task {
    options: PgConnectOptions,
    functions: Functions,
    waiters: Weak<Waiters>,
    within: Duration,
    requests: mpsc::UnboundedReceiver<Answer>,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.requests.close();
        if let Some(waiters) = self.waiters.upgrade() {
            waiters.wake_all();
        }
    }
}

/// A connection that listens, and its number.
struct Session {
    connection: PgListener,
    number: i64,
}

impl Task {
    async fn run(mut self) {
        // Without a waiter there is no connection.
        while let Some(first) = self.requests.recv().await {
            let connecting = timeout(self.within, self.connect());
            let connected = connecting.await.unwrap_or_else(|_| Err(silent()));
            let session = match connected {
                Ok(session) => session,
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "cannot listen for the turns of waiters");
                    let error = LeaseError::unavailable(error);
                    // Those that asked meanwhile fail with the first one.
                    let _ = first.send(Err(error.clone()));
                    while let Ok(other) = self.requests.try_recv() {
                        let _ = other.send(Err(error.clone()));
                    }
                    continue;
                }
            };
            let _ = first.send(Ok(session.number));
            if !self.hear(session).await {
                return;
            }
            // Each waiter asks again: for its place, or for an error.
            let Some(waiters) = self.waiters.upgrade() else {
                return;
            };
            waiters.wake_all();
            sleep(Duration::from_millis(10)).await;
        }
    }

    async fn connect(&self) -> sqlx::Result<Session> {
        // A pool of one, as the listener wants it. It opens none without being asked.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .acquire_timeout(self.within)
            .connect_lazy_with(self.options.clone());
        let mut connection = PgListener::connect_with(&pool).await?;
        connection.eager_reconnect(false);
        let number: i64 = rand::random();
        let prefix = self.functions.database.prefix().await;
        let prefix = prefix.map_err(|error| sqlx::Error::Configuration(error.cause))?;
        let register = format!("SELECT {prefix}lease_listen({number})");
        connection.execute(AssertSqlSafe(register)).await?;
        connection
            .listen(&format!("tower_fence_{number:x}"))
            .await?;
        Ok(Session { connection, number })
    }

    /// Hands on what is notified, until the connection is lost; false where no waiter can come any more.
    async fn hear(&mut self, mut session: Session) -> bool {
        let mut next_look = Instant::now() + LOOK_INTERVAL;
        let silence = LOOK_INTERVAL + 2 * self.within;
        let mut heard_at = Instant::now();
        let mut looking: Option<BoxFuture<'_, Result<Vec<String>, LeaseError>>> = None;
        // What processes have left that died is swept by the next one that comes.
        self.functions.sweep_in_background();
        loop {
            tokio::select! {
                notified = session.connection.try_recv() => {
                    let Ok(Some(notified)) = notified else {
                        return true;
                    };
                    let Some(waiters) = self.waiters.upgrade() else {
                        return false;
                    };
                    waiters.deliver(notified.payload());
                    drop(waiters);
                    heard_at = Instant::now();
                    // The next one may have been read already, and then nothing else gives way.
                    yield_now().await;
                }
                request = self.requests.recv() => match request {
                    Some(answer) => drop(answer.send(Ok(session.number))),
                    None => return false,
                },
                Some(open) = async { Some(looking.as_mut()?.await) } => {
                    looking = None;
                    match (open, self.waiters.upgrade()) {
                        (Ok(open), Some(waiters)) => {
                            open.iter().for_each(|resource| waiters.wake_first(resource));
                        }
                        // The next look tells whether the connection is lost.
                        (Err(error), _) => tracing::warn!(error = %Chain(&error), "no look at the queues"),
                        (Ok(_), None) => {}
                    }
                }
                () = sleep_until(next_look) => {
                    next_look = Instant::now() + LOOK_INTERVAL;
                    let Some(waiters) = self.waiters.upgrade() else {
                        return false;
                    };
                    let resources = waiters.resources();
                    if resources.is_empty() {
                        heard_at = Instant::now();
                    } else if heard_at.elapsed() > silence {
                        tracing::warn!("the connection that listens is lost: it has heard nothing");
                        return true;
                    } else if looking.is_none() {
                        let (functions, number) = (self.functions.clone(), session.number);
                        looking = Some(Box::pin(async move { functions.open(&resources, number).await }));
                    }
                }
            }
        }
    }
}

fn silent() -> sqlx::Error {
    let silent = "the database did not answer in time";
    IoError::new(ErrorKind::TimedOut, silent).into()
}
