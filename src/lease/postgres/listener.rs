//! Connection on which a process receives notifications. One connection serves all its waiters, in
//! addition to the pool.
//!
//! 1. The session of the connection is registered in `tower_fence.listeners`, under a random number
//!    that is part of the channel's name. A role that can read neither the table nor the statements
//!    of other sessions cannot determine the channel, and therefore cannot flood it. When the
//!    session has ended, all waiters with its number are skipped.
//! 2. While requests wait, the process checks every two seconds, on a connection of the pool, which
//!    of their resources are free. The check also sends a notification to the listener. The process
//!    thereby detects if the process of the first waiter has terminated or is frozen, or if the
//!    connection was lost silently.
//! 3. A notification is a hint. It wakes a waiter, which queries the database. After each
//!    notification the task yields, so that a flood of notifications does not block other tasks.

use std::{
    io::{Error as IoError, ErrorKind},
    time::Duration,
};

use futures_util::future::BoxFuture;
use sqlx::{
    AssertSqlSafe, Executor,
    postgres::{PgConnectOptions, PgListener, PgPoolOptions},
};
use tokio::{
    task::yield_now,
    time::{Instant, sleep_until, timeout},
};

use super::functions::Functions;
use crate::{
    chain::Chain,
    lease::{LeaseError, Turns},
    token::Resource,
};

/// Interval at which the queues are checked while requests wait.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Receiver of notifications.
pub(super) struct Listener<'a> {
    /// The options of the listening connection.
    pub(super) options: PgConnectOptions,
    pub(super) functions: &'a Functions,
    /// The timeout for a response of the database.
    pub(super) answer_timeout: Duration,
}

/// Connection that listens, and its number in `tower_fence.listeners`.
struct Session {
    connection: PgListener,
    number: i64,
}

impl Listener<'_> {
    /// Connects, and receives notifications until the connection is lost.
    pub(super) async fn listen(&self, turns: &Turns) -> Result<(), LeaseError> {
        let connected = timeout(self.answer_timeout, self.connect()).await;
        let session = connected.map_err(|_| LeaseError::unavailable(silent()))??;
        turns.ready(session.number);
        self.receive(session, turns).await;
        Ok(())
    }

    async fn connect(&self) -> Result<Session, LeaseError> {
        let prefix = self.functions.prefix().await?;
        let session = self.register(&prefix).await;
        session.map_err(Functions::not_registered)
    }

    async fn register(&self, prefix: &str) -> sqlx::Result<Session> {
        // `PgListener` needs a pool. This pool has a single connection, which is opened on demand.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .acquire_timeout(self.answer_timeout)
            .connect_lazy_with(self.options.clone());
        let mut connection = PgListener::connect_with(&pool).await?;
        connection.eager_reconnect(false);
        let number = rand::random_range(1..=i64::MAX);
        // A session that only receives notifications is idle.
        let register =
            format!("SET idle_session_timeout = 0; SELECT {prefix}lease_listen({number})");
        connection.execute(AssertSqlSafe(register)).await?;
        connection
            .listen(&format!("tower_fence_{number:x}"))
            .await?;
        Ok(Session { connection, number })
    }

    /// Passes notifications on until the connection is lost.
    async fn receive(&self, mut session: Session, turns: &Turns) {
        let mut next_poll = Instant::now() + POLL_INTERVAL;
        let silence = POLL_INTERVAL + 2 * self.answer_timeout;
        let mut notified_at = Instant::now();
        let mut poll: Option<BoxFuture<'_, Result<Vec<String>, LeaseError>>> = None;
        // Remove the waiters of terminated processes.
        self.functions.sweep_in_background();
        loop {
            tokio::select! {
                notified = session.connection.try_recv() => {
                    let Ok(Some(notified)) = notified else {
                        return;
                    };
                    deliver(turns, notified.payload());
                    notified_at = Instant::now();
                    // If the next notification was already read, no other `await` in this loop
                    // yields.
                    yield_now().await;
                }
                Some(open) = async { Some(poll.as_mut()?.await) } => {
                    poll = None;
                    match open {
                        Ok(open) => {
                            let open = open.into_iter().filter_map(|name| Resource::new(name).ok());
                            open.for_each(|resource| turns.retry_in(&resource, Duration::ZERO));
                        }
                        // If the connection is lost, the next check detects it.
                        Err(error) => tracing::warn!(error = Chain(&error).to_string(), "could not check the queues"),
                    }
                }
                () = sleep_until(next_poll) => {
                    next_poll = Instant::now() + POLL_INTERVAL;
                    let resources = turns.resources();
                    if resources.is_empty() {
                        notified_at = Instant::now();
                    } else if notified_at.elapsed() > silence {
                        tracing::warn!("the listening connection is lost: it received no notifications");
                        return;
                    } else if poll.is_none() {
                        let names: Vec<_> = resources.iter().map(ToString::to_string).collect();
                        let (functions, number) = (self.functions.clone(), session.number);
                        poll = Some(Box::pin(async move { functions.open(&names, number).await }));
                    }
                }
            }
        }
    }
}

/// Evaluates a notification of an SQL function, which contains a ticket and the time in
/// milliseconds for which the resource stays blocked. If the lease id of the request was released,
/// a `-` precedes the ticket.
fn deliver(turns: &Turns, payload: &str) {
    let Some((ticket, blocked_ms)) = payload.split_once(' ') else {
        return;
    };
    let released = ticket.strip_prefix('-');
    if let (Ok(ticket), Ok(blocked_ms)) = (released.unwrap_or(ticket).parse(), blocked_ms.parse()) {
        match blocked_ms {
            _ if released.is_some() => turns.call_off(ticket),
            0 => turns.call(ticket),
            _ => turns.call_in(ticket, Duration::from_millis(blocked_ms)),
        }
    }
}

fn silent() -> sqlx::Error {
    let silent = "the database did not answer in time";
    IoError::new(ErrorKind::TimedOut, silent).into()
}
