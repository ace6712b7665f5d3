//! Admission: waiting in the queues of the process, taking a connection, and then taking the row
//! locks.

use std::time::Duration;

use super::transact::{Halt, Plan, ensure_checked};
use crate::{
    fence::{
        Fence, FencedTx, TokenUse,
        claims::{Claim, Claims},
        error::AdmitError,
        fault::Failure,
        local::{Permit, QueueKey},
        settings::Limits,
        sql::{Admission, Admit, FenceDatabase, On},
        tx::Transaction,
    },
    metrics,
    time::after,
    token::{Resource, Token},
};

impl<DB: FenceDatabase> Fence<DB> {
    /// Opens a transaction and admits `token` in it.
    ///
    /// # Errors
    ///
    /// - [`AdmitError::Stale`] if the token is not greater than `max_token`.
    /// - [`AdmitError::Busy`] if the wait for a connection or for the row lock timed out, or if the
    ///   transaction collided with others.
    /// - [`AdmitError::NotMigrated`] if the tables are missing or outdated: call
    ///   [`migrate`](Self::migrate).
    /// - [`AdmitError::Misconfigured`] if a privilege is missing, `PUBLIC` may execute functions of
    ///   the fence, or row-level security hides rows of its tables.
    /// - [`AdmitError::Unavailable`] if the database is unreachable.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, no open transaction and no lock remain.
    pub async fn begin(
        &self,
        resource: &Resource,
        token: Token,
        token_use: TokenUse,
    ) -> Result<FencedTx<DB>, AdmitError> {
        let one = Claims::one(resource.clone(), token);
        self.refuse_stale(&one, token_use)?;
        self.begin_admitted(one, token_use, false).await
    }

    /// Opens a transaction and admits several tokens in it, one for each resource. Admits all
    /// tokens or none.
    ///
    /// Whatever the order of `tokens` is, the row locks are taken in a fixed order, so that two
    /// such transactions never deadlock. The locks are taken one after the other. Each lock takes
    /// one round trip, and the wait for each lock may take the whole
    /// [`lock_timeout`](crate::FenceBuilder::lock_timeout).
    ///
    /// If a resource occurs with two different tokens, the lower token is stale. If it occurs twice
    /// with the same token, the pair counts once.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// # use tower_fence::{AdmitError, Fence, Resource, Token, TokenUse};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let fence = Fence::new(options.connect("sqlite::memory:").await?);
    /// # fence.migrate().await?;
    /// let (from, to) = (Resource::new("sku-1")?, Resource::new("sku-2")?);
    /// let tokens = [(from.clone(), Token::new(42)?), (to, Token::new(7)?)];
    /// let mut tx = fence.begin_all(&tokens, TokenUse::SingleUse).await?;
    /// // … take from one, add to the other …
    /// tx.commit().await?;
    /// assert_eq!(fence.inspect(&from).await?, Some(42));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the errors of [`begin`](Self::begin). If one token is stale, none is admitted, and
    /// [`StaleToken`](crate::StaleToken) contains the resource of the stale token. Returns
    /// [`AdmitError::NoResource`] if `tokens` is empty.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, no open transaction and no lock remain.
    pub async fn begin_all(
        &self,
        tokens: &[(Resource, Token)],
        token_use: TokenUse,
    ) -> Result<FencedTx<DB>, AdmitError> {
        let mut claims: Vec<Claim> = Vec::with_capacity(tokens.len());
        for (resource, token) in tokens {
            let claim = Claim::new(resource.clone(), *token);
            if !claims.contains(&claim) {
                claims.push(claim);
            }
        }
        let claims = Claims::new(claims).ok_or(AdmitError::NoResource)?;
        self.refuse_stale(&claims, token_use)?;
        self.begin_admitted(claims, token_use, false).await
    }

    /// Admits `token` in a transaction that the caller has opened.
    ///
    /// The caller must ensure that a transaction is open on `conn`, runs at READ COMMITTED, and has
    /// timeouts, which this call does not change. On Citus, this call sets the timeouts of the
    /// fence in the transaction on the worker, and after a failover of the worker takes a second
    /// connection of the fence's pool. The caller must also check the outcome of COMMIT, and roll
    /// the transaction back if this call fails. Without a transaction, the check and the write are
    /// not atomic. For several resources, call this method in the byte order of their names, as
    /// [`begin_all`](Self::begin_all) does. Otherwise two transactions can deadlock.
    ///
    /// On SQLite, begin the transaction with `BEGIN IMMEDIATE`. Otherwise an admission after a read
    /// can fail with [`AdmitError::Busy`] without waiting, and only a new transaction can succeed.
    ///
    /// The [guide](crate::guide::ways_to_write#a-transaction-of-your-own) contains an example.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`begin`](Self::begin). At a stricter isolation level, a serialization
    /// failure is returned as [`AdmitError::Busy`].
    pub async fn admit(
        &self,
        conn: &mut DB::Connection,
        resource: &Resource,
        token: Token,
        token_use: TokenUse,
    ) -> Result<(), AdmitError> {
        let names = &self.connections.names;
        ensure_checked::<DB>(On::new(conn, names)).await?;
        let claim = Claim::new(resource.clone(), token);
        let admit = Admit::new(&claim, token_use, self.limits);
        let mut admission = DB::admit_only(On::new(conn, names), admit)
            .await
            .map_err(Failure::from)?;
        if let Admission::Behind = admission {
            // Citus refuses a transaction in which both the caller's role and the owner of the
            // fence write to a shard.
            if names.is_distributed() {
                self.catch_up(&Claims::one(resource.clone(), token)).await?;
            } else {
                let caught_up = DB::catch_up(On::new(conn, names), resource).await;
                caught_up.map_err(Failure::from)?;
            }
            admission = DB::admit_only(On::new(conn, names), admit)
                .await
                .map_err(Failure::from)?;
        }
        match admission {
            Admission::Admitted(_) => Ok(()),
            // Do not cache this refusal. It may depend on changes in the caller's transaction,
            // which may be rolled back.
            Admission::Stale(stale) => Err(stale.refuse(&claim, token_use).into()),
            // This transaction is not early.
            Admission::Behind | Admission::TooEarly => Err(Failure::undecided().into()),
        }
    }

    /// Opens a transaction and admits the claims in it. The caller has checked that the cache does
    /// not refuse them.
    ///
    /// A fenced read (`is_read`) is a reusable write that writes nothing. Its COMMIT waits for the
    /// WAL flush, so that no older token is admitted after a crash. `write_use` is the use of
    /// tokens by writes, on which `StaleToken::used` depends.
    pub(crate) async fn begin_admitted(
        &self,
        claims: Claims,
        write_use: TokenUse,
        is_read: bool,
    ) -> Result<FencedTx<DB>, AdmitError> {
        let ordered = claims.in_lock_order();
        let permits = self
            .wait_in_queues(&ordered, self.limits.lock_timeout)
            .await?;
        let limits = Limits {
            durable: is_read,
            ..self.limits
        };
        let token_use = match is_read {
            true => TokenUse::Reusable,
            false => write_use,
        };
        let plan = Plan::admitting(limits, &claims);
        let opened = self.open(plan, async |transaction| {
            let admitted = self.admit_all(transaction, &ordered, token_use, write_use, None);
            admitted.await
        });
        let (transaction, ()) = opened.await?;
        Ok(FencedTx::new(transaction, claims, permits))
    }

    /// Admits claims in an open transaction, and takes one row lock after the other, in this order.
    /// A refusal depends on `write_use`, the use of tokens by writes. `first` is the admission of
    /// the first claim, if it has already been attempted.
    pub(super) async fn admit_all(
        &self,
        transaction: &mut Transaction<DB>,
        ordered: &[&Claim],
        token_use: TokenUse,
        write_use: TokenUse,
        mut first: Option<Admission>,
    ) -> Result<(), Halt> {
        for &claim in ordered {
            let admission = match first.take() {
                Some(admission) => admission,
                None => {
                    let admit = Admit::new(claim, token_use, transaction.limits());
                    let early = transaction.began_early;
                    transaction
                        .run(async |on| DB::admit(on, admit, early).await)
                        .await?
                }
            };
            match admission {
                Admission::Admitted(id) => transaction.id = id,
                Admission::Stale(stale) => {
                    // If a resource occurs twice, this transaction itself has raised the row, and
                    // the rollback undoes that raise. Such a refusal must not be cached.
                    let same = ordered.iter().filter(|one| one.resource == claim.resource);
                    if same.count() == 1 {
                        self.stale.insert(&claim.resource, stale);
                    }
                    return Err(Halt::Stale(stale.refuse(claim, write_use)));
                }
                Admission::Behind => return Err(Halt::Behind),
                Admission::TooEarly => return Err(Halt::TooEarly),
            }
        }
        Ok(())
    }

    /// Refuses tokens that are stale according to the cache of this process, without a query, and
    /// counts the refusal.
    pub(crate) fn refuse_stale(
        &self,
        claims: &Claims,
        token_use: TokenUse,
    ) -> Result<(), AdmitError> {
        let known = claims
            .iter()
            .try_for_each(|claim| self.stale.check(claim, token_use));
        if known.is_err() {
            metrics::count("tower_fence_refused_from_memory_total");
        }
        Ok(known?)
    }

    /// Waits for the other writes of this process to the same resources, without a connection. The
    /// claims are in the lock order.
    pub(super) async fn wait_in_queues(
        &self,
        ordered: &[&Claim],
        within: Duration,
    ) -> Result<Vec<Permit>, Failure> {
        let until = after(within);
        let mut permits = Vec::with_capacity(ordered.len());
        for same in ordered.chunk_by(|a, b| a.resource == b.resource) {
            let key = QueueKey::Resource(same[0].resource.clone());
            let permit = self.queues.wait(key, until).await;
            permits.push(permit.ok_or_else(Failure::in_use)?);
        }
        Ok(permits)
    }
}
