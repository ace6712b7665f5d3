//! Calls of the functions in Postgres that stand beside the fence's tables.

use std::time::Duration;

use sqlx::{
    AssertSqlSafe, Postgres,
    postgres::{PgConnectOptions, PgRow},
};

use crate::{
    calls::{CallError, CallFuture, Calls, Statements},
    fence::{Fence, error::AdmitError, tx::StandaloneStatement},
};

impl Calls for Fence<Postgres> {
    fn call<'a>(&'a self, statements: Statements<'a>) -> CallFuture<'a, Vec<PgRow>> {
        Box::pin(async move {
            let tables = self.known_tables().await.map_err(failed)?;
            let lock_ms = self.limits.lock_wait.as_millis().clamp(1, i32::MAX as u128);
            let sql = format!(
                "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = {lock_ms}; {}",
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

fn failed(error: impl Into<AdmitError>) -> CallError {
    CallError(Box::new(error.into()))
}
