//! Failover: a database that was promoted or restored may have lost its latest commits.
//!
//! 1. If the timeline of the WAL has changed, the first use of each resource moves the resource to
//!    the current timeline (`catch_up`). Unless `notice_failover` is off, this makes the earlier
//!    tokens of the resource stale.
//! 2. An operator reports every other failover (`after_failover`), before any client writes.
//!
//! [The guide](crate::guide::failover#why-earlier-tokens-become-stale) describes why the fence
//! makes all earlier tokens stale, how it detects a failover, and which failovers an operator must
//! report.

use std::pin::Pin;

#[cfg(feature = "postgres")]
use sqlx::Postgres;
use tokio::time::timeout_at;
use tracing::Instrument;

use crate::{
    epochs::partition_of,
    fence::{
        Fence,
        claims::Claims,
        error::AdmitError,
        fault::Failure,
        local::QueueKey,
        sql::{FenceDatabase, On},
    },
    metrics,
    sampler::Sampler,
    time::after,
    token::Resource,
};

impl<DB: FenceDatabase> Fence<DB> {
    /// Makes every token stale that has been granted, even if the database has lost the record of
    /// its grant.
    ///
    /// Call this method if the database may have lost confirmed commits, and **before any client
    /// writes again**. Without this call, even writes that are confirmed *afterwards* [can be
    /// lost](crate::guide::failover#why-earlier-tokens-become-stale). On Postgres, the fence makes
    /// these tokens stale automatically if the timeline of the WAL shows that the server was
    /// promoted or restored from its archive; see [`notice_failover`](Self::notice_failover). Call
    /// this method in all other cases: a dump was loaded, a copy of the disks was restored, or
    /// SQLite's file was restored. Restore the fence's tables together with the tables that they
    /// protect.
    ///
    /// Leases that are stored in this database are lost. Other lease stores begin new epochs at
    /// their first announced grant, or within a minute of their first grant or renewal. Without
    /// announcements, their first grants may therefore have stale tokens. Holders must acquire
    /// their leases again and read their data again.
    ///
    /// Each of the 256 partitions moves up by 500 epochs (of 999,999), and by 1,000 more for each
    /// promotion that the partition has not caught up with yet. One transaction updates the rows of
    /// all resources, while other writes wait. It may take [minutes and much disk
    /// space](crate::guide::failover#failover-runbook), and is durable even with
    /// `synchronous_commit = off`. It fails after 10 minutes, or if it waits more than 10 s for
    /// another transaction.
    ///
    /// Returns false if the database has no record of an epoch, either because the tokens belong to
    /// another issuer, or because the failover has lost the first epoch. Then all tokens stay
    /// valid: see [how many calls are needed](crate::guide::failover#how-many-calls-are-needed).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// # use tower_fence::{Fence, Resource, Token, lease::MemoryLeases, client::Holder};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let fence = Fence::new(options.connect("sqlite::memory:").await?);
    /// # fence.migrate().await?;
    /// # let leases = MemoryLeases::new(fence.clone()).announced_to(fence.clone());
    /// let lease = Holder::new(leases).acquire("sku-1").await?;
    /// fence.after_failover().await?;
    /// assert!(fence.inspect(lease.resource()).await? > Some(lease.token().get()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// On Postgres, the database role needs EXECUTE on `tower_fence.after_failover`. This SQL
    /// function takes a number of calls, and has no limit of 10 minutes.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`begin`](Self::begin). After an error, call this method again.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the transaction is committed completely or not at all.
    pub async fn after_failover(&self) -> Result<bool, AdmitError> {
        let has_epochs = self
            .in_transaction(self.limits.long(), async |on| DB::after_failover(on).await)
            .await?;
        match has_epochs {
            true => tracing::warn!("made all granted tokens stale, as after a failover"),
            false => {
                tracing::warn!("no token became stale: the database has no record of an epoch")
            }
        }
        Ok(has_epochs)
    }

    /// Moves the resources to the current timeline of the database.
    ///
    /// On a distributed fence, this method updates all rows of a worker, which can take minutes.
    /// Therefore, this process runs at most one such update, in a task of its own. If the request
    /// is dropped, the task continues. A request waits for the task at most for the lock timeout.
    pub(super) fn catch_up<'a>(
        &'a self,
        claims: &'a Claims,
    ) -> Pin<Box<dyn Future<Output = Result<(), AdmitError>> + Send + 'a>> {
        Box::pin(async move {
            if !self.checked_names().await?.is_distributed() {
                return self.catch_up_each(claims).await;
            }
            let until = after(self.limits.lock_timeout);
            let turn = self.queues.wait(QueueKey::CatchUp, until).await;
            let turn = turn.ok_or_else(Failure::in_use)?;
            let (fence, claims) = (self.clone(), claims.clone());
            let catching_up = async move {
                let outcome = fence.catch_up_each(&claims).await;
                drop(turn);
                outcome
            };
            let catching_up = tokio::spawn(catching_up.in_current_span());
            match timeout_at(until, catching_up).await {
                Ok(Ok(outcome)) => outcome,
                // The task panicked, or is still running.
                Ok(Err(_)) | Err(_) => Err(Failure::in_use().into()),
            }
        })
    }

    /// Moves the resources to the current timeline, each in its own transaction.
    async fn catch_up_each(&self, claims: &Claims) -> Result<(), AdmitError> {
        let limits = self.limits_on_workers().await?;
        for claim in claims.iter() {
            let behind = self
                .in_transaction(limits, async |on| DB::catch_up(on, &claim.resource).await)
                .await?;
            if behind {
                note_caught_up(&claim.resource);
            }
        }
        Ok(())
    }
}

/// Reports that a resource is used for the first time since a failover. The log has at most one
/// line per second, because a failover concerns all resources.
fn note_caught_up(resource: &Resource) {
    static CAUGHT_UP: Sampler = Sampler::new();
    metrics::count("tower_fence_caught_up_total");
    if let Some(suppressed) = CAUGHT_UP.next() {
        tracing::warn!(
            resource = resource.as_str(),
            partition = partition_of(resource),
            suppressed,
            "the resource was last used on another timeline of the database"
        );
    }
}

#[cfg(feature = "postgres")]
impl Fence<Postgres> {
    /// Sets whether the fence makes all earlier tokens stale, as
    /// [`after_failover`](Self::after_failover) does, if the timeline of the server's WAL has
    /// changed. Default: yes.
    ///
    /// The timeline changes at each promotion of a standby, and when a server is restored from its
    /// archive. When a resource is next written to, read under a token, or raised, the fence first
    /// makes the earlier tokens of the resource stale. The setting is stored in the database, so it
    /// applies to all processes and to the SQL functions.
    ///
    /// Switch the setting off if every COMMIT waits for all standbys that may be promoted, or if
    /// [`after_failover`](Self::after_failover) is a step of every promotion. A promotion then does
    /// not change the fence, and leases continue. A call does not affect how promotions before the
    /// call are treated.
    ///
    /// The database role needs EXECUTE on `tower_fence.notice_failover`. The method waits up to
    /// 10 s for each row that another transaction has locked.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`begin`](Self::begin).
    pub async fn notice_failover(&self, enabled: bool) -> Result<(), AdmitError> {
        self.in_transaction(self.limits.long(), async |On { conn, names }| {
            sqlx::query(names.sql("SELECT tower_fence.notice_failover($1)"))
                .bind(enabled)
                .execute(conn)
                .await
        })
        .await?;
        Ok(())
    }
}
