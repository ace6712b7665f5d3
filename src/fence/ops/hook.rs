//! What an application runs in each transaction, before its own writes.

use std::{fmt, pin::Pin, sync::Arc};

use sqlx::Database;
use tokio::time::Instant;

use crate::fence::{Fence, error::AdmitError, fault::Fault, sql::FenceDatabase, tx::Transaction};

/// What a hook returns: `Box::pin(async move { … })`.
pub type HookFuture<'c> = Pin<Box<dyn Future<Output = sqlx::Result<()>> + Send + 'c>>;

type Run<DB> = dyn for<'c> Fn(&'c mut <DB as Database>::Connection) -> HookFuture<'c> + Send + Sync;

/// A hook that is set, or none.
pub(in crate::fence) struct Hook<DB: Database>(Option<Arc<Run<DB>>>);

impl<DB: FenceDatabase> Fence<DB> {
    /// Runs `hook` in each transaction that this fence opens for writes, once its tokens are
    /// admitted and before anything else: what is set there with `SET LOCAL` (a tenant for row-level
    /// security, a role) holds for the writes, and ends with the transaction. Default: nothing.
    ///
    /// It runs for [`begin`](Self::begin) and [`begin_all`](Self::begin_all), in every mode of
    /// `FenceLayer`, and for [`write`](Self::write), which then needs a transaction instead of a
    /// single statement. It does not run for [`admit`](Self::admit), in a transaction of the
    /// caller's. What depends on the request is a hook of the layer.
    ///
    /// Where it fails the transaction is rolled back and the token stays usable: the answer is
    /// [`AdmitError::Busy`] or [`AdmitError::Unavailable`] where the database was, else
    /// [`AdmitError::Hook`]. It has as long as the [hold limit](Self::hold_limit), what it takes of that is the
    /// handler's no more, and its end is [`AdmitError::HookTimeout`].
    ///
    /// ```
    /// # fn example(fence: tower_fence::Fence<sqlx::Postgres>) -> tower_fence::Fence<sqlx::Postgres> {
    /// fence.on_begin(|conn| {
    ///     Box::pin(async move {
    ///         sqlx::query("SET LOCAL ROLE stock_writer").execute(conn).await?;
    ///         Ok(())
    ///     })
    /// })
    /// # }
    /// ```
    #[must_use]
    pub fn on_begin<F>(mut self, hook: F) -> Self
    where
        F: for<'c> Fn(&'c mut DB::Connection) -> HookFuture<'c> + Send + Sync + 'static,
    {
        self.hook = Hook(Some(Arc::new(hook)));
        self
    }

    /// Runs the hook in a transaction whose tokens were just admitted.
    pub(super) async fn run_hook(
        &self,
        transaction: &mut Transaction<DB>,
    ) -> Result<(), AdmitError> {
        transaction.held_since = Instant::now();
        let Some(hook) = &self.hook.0 else {
            return Ok(());
        };
        let limit = self.limits.hold;
        let ran = transaction.run_within(limit, async |conn| hook(conn).await);
        ran.await.map_err(|failure| match failure.fault {
            Fault::Silent => AdmitError::HookTimeout(limit),
            Fault::Refused
            | Fault::Unfenced
            | Fault::Missing
            | Fault::Misconfigured
            | Fault::Unsupported => AdmitError::Hook(failure.cause),
            _ => failure.into(),
        })
    }
}

impl<DB: Database> Hook<DB> {
    pub(in crate::fence) const fn is_set(&self) -> bool {
        self.0.is_some()
    }
}

impl<DB: Database> Default for Hook<DB> {
    fn default() -> Self {
        Self(None)
    }
}

impl<DB: Database> Clone for Hook<DB> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<DB: Database> fmt::Debug for Hook<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "Hook(…)"
        } else {
            "none"
        })
    }
}
