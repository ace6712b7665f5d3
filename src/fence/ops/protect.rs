//! Protected tables, which refuse each write of a row unless a token for the row's resource was
//! admitted in the same transaction.

use sqlx::Postgres;

use crate::{
    fence::{Fence, error::AdmitError, sql::On},
    pattern::ResourcePattern,
};

impl Fence<Postgres> {
    /// Makes a table refuse each write of a row unless a token for the row's resource was admitted
    /// in the same transaction.
    ///
    /// Protection is a safeguard against writes by handlers without a layer, by scripts and by
    /// other services. The name of a row's resource is the pattern, filled with the columns of the
    /// row.
    ///
    /// A column of the pattern must be of type `text`, `varchar`, an integer, `uuid`, `boolean`, an
    /// enumeration, or a domain over one of these. For other types, add a stored generated column
    /// of type `text`. A second call replaces the pattern, and adds the trigger for TRUNCATE to new
    /// partitions, which do not inherit that trigger. The role of the connection must own the
    /// table. `table` is a table name in SQL syntax, such as `seats` or `shop."Seats"`.
    ///
    /// ```no_run
    /// # async fn example(
    /// #     fence: tower_fence::Fence<sqlx::Postgres>,
    /// # ) -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_fence::ResourcePattern;
    ///
    /// let seat = ResourcePattern::new("show/{show_id}/seat/{seat}")?;
    /// fence.protect("seats", &seat).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns [`AdmitError::Misconfigured`] if the role does not own the table, and
    /// [`AdmitError::NotMigrated`] if the table or a column is missing. Returns
    /// [`AdmitError::Busy`] if transactions that use the table did not end within the
    /// [`lock_timeout`](crate::FenceBuilder::lock_timeout): repeat the call. If the database
    /// refuses the call for any other reason, such as a column of an unsupported type, returns
    /// [`AdmitError::Unavailable`] with that reason as its source.
    pub async fn protect(&self, table: &str, pattern: &ResourcePattern) -> Result<(), AdmitError> {
        let pattern = pattern.to_string();
        self.in_transaction(self.limits, async |On { conn, names }| {
            sqlx::query(names.sql("SELECT tower_fence.protect($1::text::regclass, $2)"))
                .bind(table)
                .bind(&pattern)
                .execute(conn)
                .await
        })
        .await?;
        Ok(())
    }

    /// Removes the protection of a table. Returns false if the table was not protected.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`protect`](Self::protect).
    pub async fn unprotect(&self, table: &str) -> Result<bool, AdmitError> {
        self.in_transaction(self.limits, async |On { conn, names }| {
            sqlx::query_scalar(names.sql("SELECT tower_fence.unprotect($1::text::regclass)"))
                .bind(table)
                .fetch_one(conn)
                .await
        })
        .await
    }
}
