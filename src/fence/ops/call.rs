//! Calls to the fence's SQL functions in Postgres.

use std::{fmt::Write as _, pin::Pin, time::Duration};

use sqlx::{
    AssertSqlSafe, Connection, Postgres,
    postgres::{PgConnectOptions, PgRow},
};
use tokio::time::{Instant, timeout_at};

use crate::{
    calls::{Argument, CallError, CallFuture, Calls, FunctionCall, Statements},
    fence::{
        Fence,
        error::AdmitError,
        fault::{Failure, is_unprepared},
        local::QueueKey,
        settings::{FIRST_LOCK_TIMEOUT, millis},
        sql::On,
        tx::Session,
    },
    time::after,
};

impl Calls for Fence<Postgres> {
    fn run_statements<'a>(&'a self, statements: Statements<'a>) -> CallFuture<'a, Vec<PgRow>> {
        Box::pin(async move {
            let lock_timeout = self.limits.lock_timeout;
            Ok(self.attempt_statements(statements, lock_timeout).await?)
        })
    }

    fn call_function<'a>(&'a self, call: FunctionCall<'a>) -> CallFuture<'a, Vec<PgRow>> {
        Box::pin(async move {
            let lock_timeout = self.limits.lock_timeout;
            let Some(resource) = call.resource.filter(|_| lock_timeout > FIRST_LOCK_TIMEOUT) else {
                return Ok(self.attempt(&call, lock_timeout).await?);
            };
            let until = after(lock_timeout);
            let queue = QueueKey::Call(call.function, call.assigns_token, resource.clone());
            // While earlier calls are blocked, even a short attempt would only occupy a connection.
            // Many such attempts would leave no connection for other resources.
            if !self.queues.is_blocked(&queue) {
                match self.attempt(&call, FIRST_LOCK_TIMEOUT).await {
                    Err(AdmitError::Busy(cause)) if is_locked(&cause) => {}
                    outcome => return Ok(outcome?),
                }
            }
            // Another transaction has locked the rows, possibly for a long time. To limit the
            // number of connections that wait for locks, first wait in a queue and for a permit.
            let turn = self.queues.wait(queue.clone(), until).await;
            let _turn = turn.ok_or_else(|| AdmitError::from(Failure::in_use()))?;
            let permit = timeout_at(until, self.blocked_calls.acquire()).await;
            let _permit = permit.map_err(|_| AdmitError::from(Failure::in_use()))?;
            let left = until.saturating_duration_since(Instant::now());
            let called = self.attempt(&call, in_steps(left)).await;
            if !matches!(&called, Err(AdmitError::Busy(cause)) if is_locked(cause)) {
                self.queues.unblock(&queue);
            }
            Ok(called?)
        })
    }

    fn prefix(&self) -> CallFuture<'_, String> {
        Box::pin(async { Ok(self.checked_names().await?.prefix().to_owned()) })
    }

    fn session_options(&self) -> Option<PgConnectOptions> {
        let options = || self.pool().connect_options().as_ref().clone();
        (!self.limits.transaction_pooling).then(options)
    }

    fn closed(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.pool().close_event())
    }

    fn answer_timeout(&self) -> Duration {
        self.limits.answer_timeout
    }
}

/// Rounds a timeout up to a multiple of 100 ms. Without a prepared statement, the timeout is in the
/// text of a statement, and `pg_stat_statements` stores each text.
fn in_steps(timeout: Duration) -> Duration {
    const STEP: Duration = Duration::from_millis(100);
    let steps = timeout.as_nanos().div_ceil(STEP.as_nanos());
    STEP.saturating_mul(steps.try_into().unwrap_or(u32::MAX))
}

impl Fence<Postgres> {
    /// Calls the function once: in a prepared statement if possible, otherwise with literals.
    async fn attempt(
        &self,
        call: &FunctionCall<'_>,
        lock_timeout: Duration,
    ) -> Result<Vec<PgRow>, AdmitError> {
        if !self.limits.transaction_pooling && !call.arguments.is_empty() {
            let rows = self.attempt_prepared(call, lock_timeout).await?;
            if !rows.is_empty() {
                return Ok(rows);
            }
        }
        let statements = Box::new(|prefix: &str| in_literals(call, prefix));
        self.attempt_statements(statements, lock_timeout).await
    }

    /// Runs the statements once, in one transaction at READ COMMITTED.
    async fn attempt_statements(
        &self,
        statements: Statements<'_>,
        lock_timeout: Duration,
    ) -> Result<Vec<PgRow>, AdmitError> {
        let names = self.checked_names().await?;
        let sql = format!(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = {}; {}",
            millis(lock_timeout),
            statements(names.prefix())
        );
        // Read the responses to the end, because the response to the COMMIT of all statements
        // follows the last row.
        let rows = Session::standalone(&self.connections, self.limits)
            .await?
            .commit_alone(self.limits.statement_timeout(), async |on| {
                sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(on.conn).await
            })
            .await?;
        Ok(rows)
    }

    /// Calls the function in a prepared statement. Returns no row if the function was not called.
    /// In that case, the session's isolation level is stricter than READ COMMITTED, or the session
    /// does not have the statement. For example, a pooler has prepared the statement on one server
    /// connection and executed it on another.
    async fn attempt_prepared(
        &self,
        call: &FunctionCall<'_>,
        lock_timeout: Duration,
    ) -> Result<Vec<PgRow>, AdmitError> {
        let names = self.checked_names().await?;
        let sql = prepared(call, names.prefix());
        let lock_ms = millis(lock_timeout);
        let called = Session::standalone(&self.connections, self.limits)
            .await?
            .commit_alone(
                self.limits.statement_timeout(),
                async |On { conn, .. }| {
                    let mut query = sqlx::query(AssertSqlSafe(sql)).bind(lock_ms);
                    for argument in call.arguments {
                        query = match *argument {
                            Argument::Text(text) => query.bind(text),
                            Argument::Texts(texts) => query.bind(texts),
                            Argument::Bytes(bytes) => query.bind(bytes),
                            Argument::Integer(integer) => query.bind(integer),
                            Argument::Truth(truth) => query.bind(truth),
                        };
                    }
                    match query.fetch_all(&mut *conn).await {
                        Err(error) if is_unprepared(&error) => {
                            conn.clear_cached_statements().await?;
                            Ok(Vec::new())
                        }
                        rows => rows,
                    }
                },
            )
            .await;
        Ok(called?)
    }
}

fn is_locked(cause: &sqlx::Error) -> bool {
    let code = cause.as_database_error().and_then(|error| error.code());
    // lock_not_available
    code.as_deref() == Some("55P03")
}

/// SQL expression with which the transaction commits without waiting for the WAL flush.
const WITHOUT_FLUSH: &str = "pg_catalog.set_config('synchronous_commit', 'off', true)";

/// Returns the call as one statement whose first argument is the lock timeout. The function's first
/// argument depends on the result of `set_config`, so Postgres applies the settings before it calls
/// the function.
fn prepared(call: &FunctionCall<'_>, prefix: &str) -> String {
    let FunctionCall {
        function, columns, ..
    } = call;
    let without_flush = if call.without_flush {
        WITHOUT_FLUSH
    } else {
        "''"
    };
    let mut arguments = String::from("CASE WHEN settings.made THEN $2 END");
    for place in 3..call.arguments.len() + 2 {
        let _ = write!(arguments, ", ${place}");
    }
    format!(
        "SELECT {columns} FROM (\
             SELECT pg_catalog.set_config('lock_timeout', $1, true) IS NOT NULL AND {without_flush} IS NOT NULL AS made \
             WHERE pg_catalog.current_setting('transaction_isolation') = 'read committed' OFFSET 0\
         ) AS settings, LATERAL {prefix}{function}({arguments}) AS a"
    )
}

fn in_literals(call: &FunctionCall<'_>, prefix: &str) -> String {
    let FunctionCall {
        function, columns, ..
    } = call;
    let arguments: Vec<_> = call
        .arguments
        .iter()
        .map(|argument| argument.literal())
        .collect();
    let without_flush = if call.without_flush {
        "SET LOCAL synchronous_commit = off; "
    } else {
        ""
    };
    let arguments = arguments.join(", ");
    format!("{without_flush}SELECT {columns} FROM {prefix}{function}({arguments}) AS a")
}

impl From<AdmitError> for CallError {
    fn from(error: AdmitError) -> Self {
        Self {
            is_misconfigured: error.is_misconfigured(),
            cause: Box::new(error),
        }
    }
}
