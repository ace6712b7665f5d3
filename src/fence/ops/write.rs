//! One statement, together with its admission: [`Fence::write`].
//!
//! 1. Where the database can, check and write are one statement, and so one round trip behind the test of its
//!    connection. It is a transaction of its own: all of it commits, or nothing.
//! 2. Its snapshot may be older than the last write to the resource, which it would not see. So it
//!    also demands that the row of the fence is the version that its snapshot sees.
//! 3. Where that is not so, where the token is stale, or where it finds nothing to write, it fails,
//!    and nothing stays of it. Then the same happens in an open transaction, which knows why: there
//!    the lock comes first, and the statement has a snapshot of its own.
//! 4. Where it collides with another transaction in there, it is over without an effect, and the whole is run once more,
//!    as an [admission](super::retry) is; but not once COMMIT was sent.

use std::sync::Arc;

use sqlx::{Execute, FromRow};
use tokio::time::Instant;

use super::transact::{Plan, Step};
use crate::{
    fence::{
        Fence, FencedTx, TokenUse,
        claims::Claims,
        error::{AdmitError, WriteError},
        fault::{Failure, Fault},
        local::Permit,
        settings::Limits,
        sql::{Admit, FenceDatabase, Names, Statement},
        tx::StandaloneStatement,
    },
    token::{Resource, Token},
};

impl<DB: FenceDatabase> Fence<DB> {
    /// Admits `token` and runs one statement, at once: on Postgres as a single statement, which is
    /// also the COMMIT. On a connection that the fence has not used a moment ago another round trip comes before it, to find
    /// out whether the application has left it in a transaction; and so does the pool's own test.
    ///
    /// `query` is an `INSERT`, `UPDATE` or `DELETE` of sqlx's with `RETURNING`. It sees a relation
    /// `fence`, which has one row when the token is admitted and none otherwise, and must depend on
    /// it: `… WHERE … AND EXISTS (SELECT 1 FROM fence)`, or for an insert
    /// `INSERT INTO … SELECT … FROM fence`. The rows that it returns are what it has written. Where
    /// it returns none, nothing counts as written: the token stays usable, and everyone older is
    /// dead.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// # use tower_fence::{Fence, Resource, Token, TokenUse};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let fence = Fence::new(options.connect("sqlite::memory:").await?);
    /// # fence.migrate().await?;
    /// # sqlx::raw_sql("CREATE TABLE stock (sku TEXT, n BIGINT); INSERT INTO stock VALUES ('sku-1', 9)")
    /// #     .execute(fence.pool()).await?;
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
    /// Why this is safe although the statement's snapshot may be older than the lock of the fence's
    /// row: every fenced write makes a new version of that row. The statement also demands that the
    /// version it locks is the one its snapshot sees; then nobody has written in between, and nobody
    /// can until it commits. Otherwise it writes nothing, and is run again in an open transaction
    /// that takes the lock first. So it does when another process has just written to the resource,
    /// when the statement returned no row, and for the first token of a resource.
    ///
    /// Postgres logs an error with the text "tower-fence: nothing is written at once" for each of
    /// these: that is how the statement undoes itself, triggers included.
    ///
    /// What the statement does outside of the database (a function that sends something, a foreign
    /// table without transactions, a sequence) does not undo itself, and happens once more in each
    /// further run: such a statement belongs into a [`FencedTx`], after
    /// [`begin`](Self::begin).
    ///
    /// If the fence is distributed over a Citus cluster, the statement always runs in an open transaction.
    ///
    /// Not possible: tables whose rules rewrite the statement (Postgres), a leading `WITH` (SQLite),
    /// statements that write inside of a `WITH` (Postgres), a comment behind a semicolon. A `$` with
    /// a number higher than that of the bound arguments is refused, in a literal, too: bind it. Where the process is frozen, a statement that takes long
    /// by itself is not ended by the server, as it would be in an open transaction; a
    /// `statement_timeout` of the pool's connections does that. Nor does
    /// [`lock_timeout`](crate::FenceBuilder::lock_timeout) bound its wait for a whole table, as while an `ALTER TABLE`
    /// runs: it is given up, with an unknown outcome, when an open transaction would be; a
    /// `lock_timeout` of the pool's connections makes that a [`AdmitError::Busy`]. Dropped during such
    /// a wait, the statement is not ended, and may write once the table is free.
    ///
    /// # Errors
    ///
    /// - [`WriteError::Admit`] as [`begin`](Self::begin): stale, busy, unavailable. Busy, too, where it has collided with
    ///   other transactions (40001, or a deadlock) for the whole [`lock_timeout`](crate::FenceBuilder::lock_timeout): it is repeated until
    ///   then.
    /// - [`WriteError::Statement`] when the statement failed, has an argument of a type that the
    ///   database does not know, or a `$` with a number higher than that of its arguments. Nothing was written.
    /// - [`WriteError::Unsupported`] when the database cannot run it together with its admission.
    ///   Nothing was written.
    /// - [`WriteError::Commit`] when the connection was lost meanwhile: the outcome is unknown.
    /// - [`WriteError::Rows`] when the rows are not a `T`. They were written.
    /// - [`WriteError::Independent`] when the statement does not name `fence`. It was not run.
    ///
    /// # Cancel safety
    ///
    /// Dropped while the statement is under way, its outcome is unknown to the caller; nothing
    /// leaks.
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
        match self.write_admitted(one, token_use, statement).await? {
            Written::Rows(rows) => typed(rows),
            Written::Nothing(tx) => {
                let (claims, transaction, _permits) = tx.into_parts();
                match transaction {
                    Some(transaction) => self.fail(transaction, &claims).await?,
                    None => self.fail_lost(&claims).await?,
                }
                Ok(Vec::new())
            }
        }
    }

    pub(crate) async fn write_admitted(
        &self,
        claims: Claims,
        token_use: TokenUse,
        mut statement: Statement<DB>,
    ) -> Result<Written<DB>, WriteError> {
        self.check_stale(&claims, token_use)
            .map_err(AdmitError::from)?;
        let permits = self.wait_in_queues(&claims).await?;
        let mut limits = self.limits;
        if let [claim] = &claims[..]
            && let Some(names) = self.names_at_once().await?
        {
            let began = Instant::now();
            let alone = StandaloneStatement::ready(&self.connections, limits).await;
            let alone = alone.map_err(AdmitError::from)?;
            let (wait, own) = (limits.lock_timeout, &mut statement);
            let whole = limits.transaction(None);
            let written = alone.run(async |conn| {
                let admit = Admit::new(claim, token_use, whole);
                DB::write_at_once(conn, &names, admit, wait, own).await
            });
            let rows = written.await.map_err(WriteError::alone)?;
            if !rows.is_empty() {
                return Ok(Written::Rows(rows));
            }
            // It may have waited for a lock, in vain.
            limits.lock_timeout = limits.lock_timeout.saturating_sub(began.elapsed());
        }
        self.write_in_transaction(claims, token_use, permits, limits, statement)
            .await
    }

    /// Runs the statement in an open transaction, and once more where it collides with another one.
    async fn write_in_transaction(
        &self,
        claims: Claims,
        token_use: TokenUse,
        permits: Vec<Permit>,
        limits: Limits,
        statement: Statement<DB>,
    ) -> Result<Written<DB>, WriteError> {
        let presented = &claims;
        let plan = Plan::admitting(limits, presented);
        let opened = self.open(plan, async move |transaction, names| {
            let mut statement = statement;
            let admitted = self.admit_all(transaction, names, presented, token_use, None);
            Ok(match admitted.await? {
                Step::Done(Ok(())) => {
                    let conn = transaction.connection_mut();
                    match DB::write_admitted(conn, &mut statement)
                        .await
                        .map_err(Failure::from)
                    {
                        Err(failure) if failure.fault == Fault::Collision => return Err(failure),
                        written => Step::Done(written.map_err(WriteError::in_transaction)),
                    }
                }
                Step::Done(Err(stale)) => Step::Done(Err(AdmitError::from(stale).into())),
                Step::TooEarly => Step::TooEarly,
                Step::Behind => Step::Behind,
            })
        });
        let (transaction, rows) = opened.await?;
        FencedTx::new(transaction, claims, permits)
            .commit_rows(rows?)
            .await
    }

    /// The names of the fence, if check and write can be one statement: not with a pooler in between, which
    /// may prepare it on one server and execute it on another, and not if the fence is distributed.
    async fn names_at_once(&self) -> Result<Option<Arc<Names>>, AdmitError> {
        if !DB::AT_ONCE || self.connections.transaction_pooling {
            return Ok(None);
        }
        let names = self.known_names().await?;
        // The statement would compare the history of the coordinator with that of a worker.
        Ok((!names.is_distributed()).then_some(names))
    }
}

/// What a single statement has written.
pub(crate) enum Written<DB: FenceDatabase> {
    /// These rows, and they are committed.
    Rows(Vec<DB::Row>),
    /// Nothing: the token was admitted in this transaction, in which there is nothing to commit.
    Nothing(Box<FencedTx<DB>>),
}

impl<DB: FenceDatabase> FencedTx<DB> {
    /// Runs such a statement in an open transaction, and commits what it has written.
    pub(crate) async fn write_and_commit(
        mut self,
        mut statement: Statement<DB>,
    ) -> Result<Written<DB>, WriteError> {
        let rows = self.write(&mut statement).await?;
        self.commit_rows(rows).await
    }

    /// Commits, where something was written.
    async fn commit_rows(self, rows: Vec<DB::Row>) -> Result<Written<DB>, WriteError> {
        if rows.is_empty() {
            return Ok(Written::Nothing(Box::new(self)));
        }
        self.commit().await?;
        Ok(Written::Rows(rows))
    }
}

/// The rows as what the caller wants.
pub(crate) fn typed<T, R: sqlx::Row>(rows: Vec<R>) -> Result<Vec<T>, WriteError>
where
    T: for<'r> FromRow<'r, R>,
{
    rows.iter()
        .map(|row| T::from_row(row).map_err(|error| WriteError::Rows(Arc::new(error))))
        .collect()
}
