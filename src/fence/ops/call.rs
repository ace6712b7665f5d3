//! Calls of the fence's functions in Postgres, for leases in the same database.

use sqlx::{AssertSqlSafe, Postgres, postgres::PgRow};

use crate::fence::{Fence, error::AdmitError, tx::StandaloneStatement};

impl Fence<Postgres> {
    /// Runs the statements that are made for a schema (an identifier, ready to be put into a statement), as one
    /// transaction at READ COMMITTED, and returns their rows. They are one message, and so one round trip, also
    /// where a pooler stands in between; their arguments are literals.
    ///
    /// Dropped while they are under way, they may have had their effect.
    pub(crate) async fn call(
        &self,
        statements: impl FnOnce(&str) -> String,
    ) -> Result<Vec<PgRow>, AdmitError> {
        let tables = self.known_tables().await?;
        let lock_ms = self.limits.lock_wait.as_millis().clamp(1, i32::MAX as u128);
        let sql = format!(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = {lock_ms}; {}",
            statements(tables.schema())
        );
        let standalone = StandaloneStatement::ready(&self.connections, self.limits).await?;
        // To the end: what comes behind the last row is the answer to the COMMIT of all of them.
        let rows = standalone
            .run(async |conn, _| sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(conn).await)
            .await?;
        Ok(rows)
    }

    /// The schema of the tables and functions, ready to be put into a statement.
    pub(crate) async fn schema_name(&self) -> Result<String, AdmitError> {
        Ok(self.known_tables().await?.schema().to_owned())
    }

    /// Whether a pooler in between gives each transaction a server of its own.
    pub(crate) fn has_transaction_pooling(&self) -> bool {
        self.connections.transaction_pooling
    }
}

/// Text as an expression of SQL, whatever its characters and the settings of the session.
pub(crate) fn text(value: &str) -> String {
    format!(
        "pg_catalog.convert_from({}, 'UTF8')",
        bytes(value.as_bytes())
    )
}

/// Bytes as an expression of SQL.
pub(crate) fn bytes(value: &[u8]) -> String {
    let digits: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("pg_catalog.decode('{digits}', 'hex')")
}
