//! Fence without HTTP: [`Fence`] checks a token in the transaction that writes.
//!
//! 1. Each resource has one row. Its column `max_token` is the highest stale token.
//! 2. A token is admitted if it is greater than `max_token`. One statement compares the two and
//!    raises `max_token`, in the transaction of the caller's own writes. The row stays locked until
//!    the writes are committed.
//! 3. A [single-use](TokenUse::SingleUse) write raises `max_token` to its token, which is then
//!    stale. A [reusable](TokenUse::Reusable) write raises `max_token` to one below its token. The
//!    holder may then write again with that token, and older tokens are stale.
//!
//! # Example
//!
//! A queue consumer without HTTP:
//!
//! ```
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! use tower_fence::{AdmitError, Fence, Resource, Token, TokenUse};
//!
//! let pool = sqlx::sqlite::SqlitePoolOptions::new()
//!     .max_connections(1)
//!     .connect("sqlite::memory:")
//!     .await?;
//! sqlx::query("CREATE TABLE jobs (id INTEGER)").execute(&pool).await?;
//! let fence = Fence::new(pool);
//! fence.migrate().await?;
//!
//! let queue = Resource::new("queue-1")?;
//! let mut tx = fence.begin(&queue, Token::new(2)?, TokenUse::SingleUse).await?;
//! sqlx::query("INSERT INTO jobs VALUES (7)").execute(&mut *tx).await?;
//! tx.commit().await?;
//!
//! // A holder that was paused wakes up with an older token.
//! let refused = fence.begin(&queue, Token::new(1)?, TokenUse::SingleUse).await;
//! assert!(matches!(refused, Err(AdmitError::Stale(stale)) if stale.max_token == 2));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Deployment
//!
//! - Keep one `Fence` per process and clone it, and use it and its pool in one Tokio runtime. A
//!   connection stops working when the runtime that opened it ends, even while another runtime runs
//!   a COMMIT on it.
//! - Call [`migrate`](Fence::migrate) at each start, and run [`maintain`](Fence::maintain) in one
//!   process.
//! - [`deployment`](crate::deployment) describes connections, roles, limits and
//!   [SQLite](crate::deployment#sqlite), [the guide](crate::guide::failover) describes failovers,
//!   and [the guarantees](crate::guide::guarantees#what-is-not-guaranteed) describe what the fence
//!   does not protect.

mod builder;
mod claims;
mod conn;
mod error;
mod fault;
mod local;
mod ops;
mod settings;
mod sql;
mod tx;

use std::{fmt, sync::Arc};

use derive_where::derive_where;
use sqlx::Pool;
use tokio::sync::Semaphore;

pub use self::{
    builder::{FenceBuilder, InvalidSchema},
    claims::{Admitted, Claim, TokenUse},
    error::{AdmitError, CommitError, StaleToken, WriteError},
    ops::{FenceRow, FenceState, ResetError},
    sql::FenceDatabase,
    tx::FencedTx,
};
pub(crate) use self::{
    claims::Claims,
    fault::Fault,
    ops::{Once, typed},
    sql::{KeyedRequest, RecordId, Statement, StoredResponse},
    tx::{Contents, Place, Slot, Written},
};
use self::{
    conn::Connections,
    local::{Queues, StaleTokens},
    ops::IssuedEpochs,
    settings::Limits,
};

/// [`FencedTx`] on Postgres.
#[cfg(feature = "postgres")]
pub type PgFencedTx = FencedTx<sqlx::Postgres>;

/// [`FencedTx`] on SQLite.
#[cfg(feature = "sqlite")]
pub type SqliteFencedTx = FencedTx<sqlx::Sqlite>;

/// Fence over a pool of connections to a database.
///
/// The database holds both the fence's rows and the data that they protect. A fence is cheap to
/// clone.
#[derive_where(Clone)]
pub struct Fence<DB: FenceDatabase> {
    connections: Connections<DB>,
    limits: Limits,
    queues: Arc<Queues>,
    /// Permits for calls to SQL functions that may wait for a lock. There are half as many permits
    /// as the pool may have connections.
    blocked_calls: Arc<Semaphore>,
    stale: Arc<StaleTokens>,
    failover_detection: bool,
    issued_epochs: Arc<IssuedEpochs>,
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Creates a fence over a pool of the application, `Pool<Postgres>` or `Pool<Sqlite>`, with the
    /// default settings. The pool's hooks run for each operation.
    pub fn new(pool: Pool<DB>) -> Self {
        Self::builder().build(pool)
    }

    /// Opens a pool and creates a fence over it. On Postgres, the fence reuses connections from
    /// write to write ([`reuse_connections`](FenceBuilder::reuse_connections)). This is the fastest
    /// way to write under a token.
    ///
    /// The application can use the same pool, which [`pool`](Self::pool) returns. The pool has
    /// sqlx's default options, such as at most 10 connections. For an in-memory SQLite database,
    /// the pool has one connection. [`FenceBuilder::connect_with`] accepts other options. If the
    /// application already has a pool whose hooks must run for each operation, use
    /// [`new`](Self::new).
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_fence::Fence;
    ///
    /// let fence = Fence::<sqlx::Postgres>::connect("postgres://localhost/shop").await?;
    /// fence.migrate().await?;
    /// let stock: i64 = sqlx::query_scalar("SELECT sum(stock) FROM inventory")
    ///     .fetch_one(fence.pool())
    ///     .await?;
    /// # let _ = stock;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns sqlx's error if the URL is invalid, if it has the scheme of another database and
    /// `://`, or if the database is still unreachable after 30 seconds. SQLite creates a missing
    /// file only if the URL contains `mode=rwc`.
    pub async fn connect(url: &str) -> sqlx::Result<Self> {
        Self::builder().connect(url).await
    }

    /// Returns a builder for a fence with settings other than the defaults.
    pub fn builder() -> FenceBuilder<DB> {
        FenceBuilder::new()
    }

    /// Returns the pool of this fence.
    pub fn pool(&self) -> &Pool<DB> {
        self.connections.pool()
    }

    pub(crate) const fn limits(&self) -> Limits {
        self.limits
    }
}

impl<DB: FenceDatabase> fmt::Debug for Fence<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
