//! The resource side, without HTTP: [`Fence`] checks a token in the transaction that writes.
//!
//! 1. A resource has one row, with `max_token`: the highest token that is dead.
//! 2. A token is admissible when it is greater than `max_token`. One statement checks that and
//!    moves `max_token`, in the transaction of the caller's own writes; the row stays locked until
//!    they commit.
//! 3. A [single-use](TokenUse::SingleUse) write leaves `max_token` at the token: it never writes
//!    twice. A [reusable](TokenUse::Reusable) one leaves it one below: its holder may write again,
//!    everyone older is dead.
//!
//! # Example
//!
//! A consumer of a queue, without any HTTP:
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
//! - [`Fence::connect`] opens a pool for the fence and for the application. [`Fence::new`] takes a pool that
//!   the application has: each use takes a connection from it in the task that asks, and gives it back, so
//!   its `before_acquire` and `after_release` see all of them, with the task-locals of the request.
//! - Keep one `Fence` per process and clone it: its clones share a queue per resource, in which writers
//!   wait without a connection of the pool, and the cache of stale tokens, from which stale writers are
//!   refused without asking the database (for ten seconds at a time). A fence with another
//!   [`schema`](Fence::schema) has its own.
//! - The connection of a dropped request is closed if its statement goes on, and Postgres, which looks
//!   every second whether the client is connected, ends the statement.
//! - [`migrate`](Fence::migrate) makes the tables, with a migration history of their own: on Postgres in
//!   the schema `tower_fence`, on SQLite with the prefix `tower_fence_`. On Postgres it also makes the
//!   functions that are the rules of the fence; [other programs](crate::guide#16-seaorm-diesel-and-other-languages)
//!   call them, too.
//! - Durability is the database's. With `synchronous_commit = off`, or after a failover to a
//!   standby that had not received everything, an acknowledged write and its `max_token` are lost
//!   together. Epochs and raises (of a grant, a fenced read, a failed handler) are durable even so: their
//!   transactions wait for the disk. (On SQLite that is `PRAGMA synchronous`: leave it at FULL, its
//!   default.) After a failover every token of before is dead:
//!   [when the database fails over](crate::deployment#when-the-database-fails-over).
//! - Each resource that was named with an admissible token keeps a row, and, where grants are announced,
//!   each that was ever leased, until [`Fence::remove_idle`]. Do not delete rows by hand: older tokens would be
//!   admitted again. Records of idempotency keys are removed by [`Fence::remove_expired_keys`].
//!   [`Fence::maintain`] does both at an interval.
//! - A token that is far too high closes its resource: everything below is stale from then on. An
//!   issuer whose grants are announced outranks it; otherwise [`Fence::reset`] takes it back.

mod builder;
mod claims;
mod conn;
mod connect;
mod error;
mod fault;
mod local;
mod ops;
mod settings;
mod sql;
mod token_use;
mod tx;

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use sqlx::Pool;
use tokio::sync::Semaphore;

pub use self::{
    builder::InvalidSchema,
    claims::{Admitted, AllAdmitted, Claim, Claims},
    error::{AdmitError, CommitError, StaleToken, WriteError},
    ops::{FenceRow, FenceState, ResetError},
    sql::FenceDatabase,
    token_use::TokenUse,
    tx::FencedTx,
};
use self::{
    conn::Connections,
    local::{HandedOutEpochs, Queues, StaleTokens},
    settings::Limits,
    sql::Names,
};
pub(crate) use self::{
    fault::{Fault, HandlerFault},
    local::Permit,
    ops::{KeyedRequest, Once, OnceError, Written, typed},
    sql::{RecordId, Statement, StoredResponse},
    tx::{Slot, SlotEnd, Transaction},
};

/// [`FencedTx`] on Postgres.
#[cfg(feature = "postgres")]
pub type PgFencedTx = FencedTx<sqlx::Postgres>;

/// [`FencedTx`] on SQLite.
#[cfg(feature = "sqlite")]
pub type SqliteFencedTx = FencedTx<sqlx::Sqlite>;

/// The fence: a pool of connections to the database that holds both the fence's rows and the
/// data they protect. Cheap to clone.
pub struct Fence<DB: FenceDatabase> {
    connections: Connections<DB>,
    limits: Limits,
    queues: Arc<Queues>,
    /// A permit for each call of a function that may wait for a lock: those of half of the pool.
    blocked_calls: Arc<Semaphore>,
    stale: Arc<StaleTokens>,
    names: Arc<Names>,
    failover_detection: bool,
    /// Set once the fence in the database was found to be fit for use.
    checked: Arc<OnceLock<()>>,
    handed_out: Arc<HandedOutEpochs>,
}

impl<DB: FenceDatabase> Fence<DB> {
    /// A fence over a pool, `Pool<Postgres>` or `Pool<Sqlite>`, with the default limits.
    pub fn new(pool: Pool<DB>) -> Self {
        let half_of_pool = (pool.options().get_max_connections() as usize / 2).max(1);
        Self {
            connections: Connections::new(pool),
            limits: Limits::default(),
            queues: Arc::default(),
            blocked_calls: Arc::new(Semaphore::new(half_of_pool)),
            stale: Arc::default(),
            names: Arc::new(Names::new(DB::prefix(None))),
            failover_detection: true,
            checked: Arc::default(),
            handed_out: Arc::default(),
        }
    }

    /// The pool that it was made with.
    pub fn get_pool(&self) -> &Pool<DB> {
        self.connections.pool()
    }
}

impl<DB: FenceDatabase> Clone for Fence<DB> {
    fn clone(&self) -> Self {
        Self {
            connections: self.connections.clone(),
            limits: self.limits,
            queues: Arc::clone(&self.queues),
            blocked_calls: Arc::clone(&self.blocked_calls),
            stale: Arc::clone(&self.stale),
            names: Arc::clone(&self.names),
            failover_detection: self.failover_detection,
            checked: Arc::clone(&self.checked),
            handed_out: Arc::clone(&self.handed_out),
        }
    }
}

impl<DB: FenceDatabase> fmt::Debug for Fence<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
