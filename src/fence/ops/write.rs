//! [`Fence::write`]: a single-statement write, together with its admission.
//!
//! 1. If the database supports it, the check and the write are one statement, which commits by
//!    itself. If that statement cannot write, it leaves no changes. It then runs again in an open
//!    transaction, which determines the reason. [`Fence::write`] describes the conditions.
//! 2. If the statement collides with another transaction while it runs in the open transaction, it
//!    has had no effect. The transaction is then retried like an [admission](super::transact), but
//!    never after COMMIT was sent.

use std::sync::Arc;

use sqlx::{Execute, FromRow};
use tokio::time::Instant;

use super::transact::Plan;
use crate::{
    fence::{
        Fence, FencedTx, TokenUse,
        claims::Claims,
        error::{AdmitError, WriteError},
        fault::Fault,
        local::Permit,
        settings::Limits,
        sql::{Admit, FenceDatabase, Statement},
        tx::{Session, Written},
    },
    token::{Resource, Token},
};

impl<DB: FenceDatabase> Fence<DB> {
    /// Admits `token` and runs one statement. Both are committed together or not at all.
    ///
    /// On Postgres both are a single statement, which commits by itself. [The
    /// guide](crate::guide::ways_to_write#a-single-statement) describes the round trips.
    ///
    /// `query` is an sqlx query with an `INSERT`, `UPDATE` or `DELETE` and `RETURNING`. It can read
    /// a relation `fence`, which has one row if the token is admitted and no row otherwise. The
    /// statement must depend on that relation: `… WHERE … AND EXISTS (SELECT 1 FROM fence)`, or for
    /// an insert `INSERT INTO … SELECT … FROM fence`. The rows that the statement returns are those
    /// that it has written. If it returns no row, nothing counts as written, the token stays
    /// usable, and older tokens are stale.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// # use tower_fence::{Fence, Resource, Token, TokenUse};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let fence = Fence::new(options.connect("sqlite::memory:").await?);
    /// # fence.migrate().await?;
    /// # let stock =
    /// #     "CREATE TABLE stock (sku TEXT, n BIGINT); INSERT INTO stock VALUES ('sku-1', 9)";
    /// # sqlx::raw_sql(stock).execute(fence.pool()).await?;
    /// let decrement = "UPDATE stock SET n = n - $1 \
    ///                  WHERE sku = $2 AND n >= $1 AND EXISTS (SELECT 1 FROM fence) RETURNING n";
    /// let left: Vec<(i64,)> = fence
    ///     .write(
    ///         &Resource::new("sku-1")?,
    ///         Token::new(42)?,
    ///         TokenUse::SingleUse,
    ///         sqlx::query(decrement).bind(2).bind("sku-1"),
    ///     )
    ///     .await?;
    /// assert_eq!(left, [(7,)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The statement's snapshot may be older than the lock on the fence's row. This is safe,
    /// because every fenced write creates a new version of that row, and the statement requires
    /// that the version that it locks is the version in its snapshot. No other fenced write to the
    /// resource has then happened since the snapshot. Otherwise, for example because another
    /// process has just written to the resource, the statement writes nothing, and runs again in an
    /// open transaction that takes the lock first. The statement also runs again if it returned no
    /// row, if the resource has no row yet, and if the token is the first one above an announced
    /// token. In each of these cases, Postgres logs an error with the text "tower-fence: the single
    /// statement was rolled back and runs again in a transaction". The error also rolls back the
    /// effects of triggers.
    ///
    /// Effects outside of the database's transaction (a function that sends a message, a foreign
    /// table without transactions, a sequence) are not rolled back, and occur again in each further
    /// run. Run such a statement in a [`FencedTx`] instead, after [`begin`](Self::begin).
    ///
    /// If the fence is distributed over a Citus cluster, the statement always runs in an open
    /// transaction.
    ///
    /// The following are not supported: tables whose rules rewrite the statement (Postgres), a
    /// leading `WITH` (SQLite), statements that write inside of a `WITH` (Postgres), and a comment
    /// after a semicolon. If the statement contains a `$` with a number higher than the number of
    /// bound arguments, it is refused, even if the `$` is in a literal. To use such a literal, bind
    /// it as an argument.
    ///
    /// The fence abandons a statement that takes longer than the sum of `lock_timeout`,
    /// `hold_timeout` and `answer_timeout`. If it commits by itself, its outcome is then unknown,
    /// and the server does not cancel it, unless the pool's connections have a `statement_timeout`.
    /// [`lock_timeout`](crate::FenceBuilder::lock_timeout) does not limit the statement's wait for
    /// a table lock, for example during an `ALTER TABLE`. Even if the future is dropped, the
    /// statement continues to wait, and may write after the table lock is released. If the pool's
    /// connections have a `lock_timeout`, such a wait ends with [`AdmitError::Busy`].
    ///
    /// # Errors
    ///
    /// Returns a [`WriteError`]. Nothing was written, except after [`WriteError::Rows`] and after
    /// [`OutcomeUnknown`](crate::fence::CommitError::OutcomeUnknown) in [`WriteError::Commit`]: the
    /// response to the statement or to COMMIT was lost or late. If the statement collides with
    /// other transactions (40001, or a deadlock), it is retried until the
    /// [`lock_timeout`](crate::FenceBuilder::lock_timeout) passes.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped while the statement is running, the caller does not learn the
    /// outcome. No connection and no lock leaks.
    pub async fn write<'q, T>(
        &self,
        resource: &Resource,
        token: Token,
        token_use: TokenUse,
        query: impl Execute<'q, DB>,
    ) -> Result<Vec<T>, WriteError>
    where
        T: for<'r> FromRow<'r, DB::Row>,
    {
        let statement = Statement::new(query)?;
        let one = Claims::one(resource.clone(), token);
        match self.admit_and_write(one, token_use, statement).await? {
            Written::Rows(rows) => typed(rows),
            Written::Nothing(tx) => {
                let (claims, transaction, _permits) = tx.into_parts();
                self.roll_back_and_raise(transaction, &claims).await?;
                Ok(Vec::new())
            }
        }
    }

    /// Admits the claims and runs the statement, as [`write`](Self::write) does. If the statement
    /// has written no rows, returns the open transaction.
    pub(crate) async fn admit_and_write(
        &self,
        claims: Claims,
        token_use: TokenUse,
        mut statement: Statement<DB>,
    ) -> Result<Written<DB>, WriteError> {
        self.refuse_stale(&claims, token_use)?;
        let mut limits = self.limits;
        let ordered = claims.in_lock_order();
        let waited = self.wait_in_queues(&ordered, limits.lock_timeout).await;
        let permits = waited.map_err(AdmitError::from)?;
        if let [claim] = &claims[..]
            && self.can_write_single().await?
        {
            let began = Instant::now();
            let ready = Session::standalone(&self.connections, limits).await;
            let standalone = ready.map_err(AdmitError::from)?;
            let own = &mut statement;
            let written = standalone.commit_alone(limits.write_timeout(), async |on| {
                let admit = Admit::new(claim, token_use, limits);
                DB::write_single(on, admit, own).await
            });
            let rows = written.await.map_err(WriteError::standalone)?;
            if !rows.is_empty() {
                return Ok(Written::Rows(rows));
            }
            // The attempt may have used up part of the lock timeout.
            limits.lock_timeout = limits.lock_timeout.saturating_sub(began.elapsed());
        }
        self.write_in_transaction(claims, token_use, permits, limits, statement)
            .await
    }

    /// Runs the statement in an open transaction, and retries it after a collision.
    async fn write_in_transaction(
        &self,
        claims: Claims,
        token_use: TokenUse,
        permits: Vec<Permit>,
        limits: Limits,
        statement: Statement<DB>,
    ) -> Result<Written<DB>, WriteError> {
        let ordered = &claims.in_lock_order()[..];
        let plan = Plan::admitting(limits, &claims);
        let opened = self.open(plan, async move |transaction| {
            let mut statement = statement;
            let admitted = self.admit_all(transaction, ordered, token_use, token_use, None);
            admitted.await?;
            let written =
                transaction.write(async |on| DB::write_admitted(on.conn, &mut statement).await);
            match written.await {
                Err(failure) if failure.fault == Fault::Collision => Err(failure.into()),
                written => Ok(written.map_err(WriteError::in_transaction)),
            }
        });
        let (transaction, rows) = opened.await?;
        FencedTx::new(transaction, claims, permits)
            .commit_rows(rows?)
            .await
    }

    /// Returns whether the check and the write can be one statement. This is impossible on the
    /// coordinator of a Citus cluster, which cannot combine rows on its workers with rows of its
    /// own in this way. It is also impossible with a pooler, which may prepare the statement on one
    /// server connection and execute it on another.
    async fn can_write_single(&self) -> Result<bool, AdmitError> {
        Ok(DB::HAS_SERVER
            && !self.limits.transaction_pooling
            && !self.checked_names().await?.has_workers())
    }
}

pub(crate) fn typed<T, R: sqlx::Row>(rows: Vec<R>) -> Result<Vec<T>, WriteError>
where
    T: for<'r> FromRow<'r, R>,
{
    rows.iter()
        .map(|row| T::from_row(row).map_err(|error| WriteError::Rows(Arc::new(error))))
        .collect()
}
