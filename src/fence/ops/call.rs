//! Calls of the functions in Postgres that stand beside the fence's tables.

use std::{fmt::Write as _, time::Duration};

use sqlx::{
    AssertSqlSafe, Postgres,
    postgres::{PgConnectOptions, PgRow},
};

use crate::{
    calls::{Argument, CallError, CallFuture, Calls, FunctionCall, Statements},
    fence::{Fence, error::AdmitError, tx::StandaloneStatement},
};

impl Calls for Fence<Postgres> {
    fn call<'a>(&'a self, statements: Statements<'a>) -> CallFuture<'a, Vec<PgRow>> {
        Box::pin(async move {
            let tables = self.known_tables().await.map_err(failed)?;
            let sql = format!(
                "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = {}; {}",
                self.lock_ms(),
                statements(tables.schema())
            );
            let standalone = StandaloneStatement::ready(&self.connections, self.limits).await;
            // To the end: what comes behind the last row is the answer to the COMMIT of all of them.
            let rows = standalone
                .map_err(failed)?
                .run(async |conn, _| sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(conn).await)
                .await
                .map_err(failed)?;
            Ok(rows)
        })
    }

    fn call_function<'a>(&'a self, call: FunctionCall<'a>) -> CallFuture<'a, Vec<PgRow>> {
        Box::pin(async move {
            if !self.connections.transaction_pooling && !call.arguments.is_empty() {
                let rows = self.call_prepared(&call).await?;
                if !rows.is_empty() {
                    return Ok(rows);
                }
            }
            self.call(Box::new(|schema| in_literals(&call, schema)))
                .await
        })
    }

    fn schema(&self) -> CallFuture<'_, String> {
        Box::pin(async {
            Ok(self
                .known_tables()
                .await
                .map_err(failed)?
                .schema()
                .to_owned())
        })
    }

    fn session_options(&self) -> Option<PgConnectOptions> {
        let options = || self.get_pool().connect_options().as_ref().clone();
        (!self.connections.transaction_pooling).then(options)
    }

    fn answer_wait(&self) -> Duration {
        self.limits.answer_wait
    }
}

impl Fence<Postgres> {
    /// No row, where the function was not called: the session is stricter than READ COMMITTED, or a pooler in
    /// between has prepared the statement on one server and executed it on another.
    async fn call_prepared(&self, call: &FunctionCall<'_>) -> Result<Vec<PgRow>, CallError> {
        let tables = self.known_tables().await.map_err(failed)?;
        let sql = prepared(call, tables.schema());
        let lock_ms = self.lock_ms().to_string();
        let standalone = StandaloneStatement::ready(&self.connections, self.limits).await;
        let called = standalone
            .map_err(failed)?
            .run(async |conn, _| {
                let mut query = sqlx::query(AssertSqlSafe(sql)).bind(lock_ms);
                for argument in call.arguments {
                    query = match *argument {
                        Argument::Text(text) => query.bind(text),
                        Argument::Bytes(bytes) => query.bind(bytes),
                        Argument::Integer(integer) => query.bind(integer),
                        Argument::Truth(truth) => query.bind(truth),
                    };
                }
                match query.fetch_all(conn).await {
                    // invalid_sql_statement_name
                    Err(sqlx::Error::Database(error))
                        if error.code().as_deref() == Some("26000") =>
                    {
                        Ok(Vec::new())
                    }
                    rows => rows,
                }
            })
            .await;
        called.map_err(failed)
    }

    fn lock_ms(&self) -> u128 {
        self.limits.lock_wait.as_millis().clamp(1, i32::MAX as u128)
    }
}

const LAZILY: &str = "pg_catalog.set_config('synchronous_commit', 'off', true)";

/// The call as one statement whose first argument is a limit for locks. The function's own first argument depends on
/// the settings, so they are made before it runs.
fn prepared(call: &FunctionCall<'_>, schema: &str) -> String {
    let FunctionCall {
        function, columns, ..
    } = call;
    let lazily = if call.lazily { LAZILY } else { "''" };
    let mut arguments = String::from("CASE WHEN settings.made THEN $2 END");
    for place in 3..call.arguments.len() + 2 {
        let _ = write!(arguments, ", ${place}");
    }
    format!(
        "SELECT {columns} FROM (\
             SELECT pg_catalog.set_config('lock_timeout', $1, true) IS NOT NULL AND {lazily} IS NOT NULL AS made \
             WHERE pg_catalog.current_setting('transaction_isolation') = 'read committed' OFFSET 0\
         ) AS settings, LATERAL {schema}.{function}({arguments}) AS {}",
        row(call)
    )
}

/// The call with its arguments as literals.
fn in_literals(call: &FunctionCall<'_>, schema: &str) -> String {
    let FunctionCall {
        function, columns, ..
    } = call;
    let arguments: Vec<_> = call
        .arguments
        .iter()
        .map(|argument| argument.literal())
        .collect();
    let lazily = if call.lazily {
        "SET LOCAL synchronous_commit = off; "
    } else {
        ""
    };
    let (arguments, row) = (arguments.join(", "), row(call));
    format!("{lazily}SELECT {columns} FROM {schema}.{function}({arguments}) AS {row}")
}

/// The name of the function's row.
fn row(call: &FunctionCall<'_>) -> &'static str {
    if call.columns == "a.answer" {
        "a (answer)"
    } else {
        "a"
    }
}

fn failed(error: impl Into<AdmitError>) -> CallError {
    CallError(Box::new(error.into()))
}
