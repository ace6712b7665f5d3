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
//! - Keep one `Fence` per process and clone it: its clones share a queue per resource, in which
//!   writers wait without a connection of the pool, and the memory of what is dead, from which
//!   stale writers are refused without asking the database (for ten seconds at a time).
//! - Each use takes a connection from the pool in the task that asks, and gives it back: the pool's
//!   `before_acquire` and `after_release` see all of them, with the task-locals of the request. To
//!   pass connections from write to write without them is a choice:
//!   [`reuse_connections`](Fence::reuse_connections).
//! - A statement of which the answer is no longer waited for is ended after a second, over a
//!   connection beside the pool, of which each fence has one at a time: leave room for it in the
//!   server's `max_connections`. The pool's role may end its own sessions. The transaction is found
//!   by an advisory lock with a random number, which each admission on Postgres takes.
//! - [`migrate`](Fence::migrate) makes the tables in the schema that the pool's connections see
//!   first: `fence_resources`, `fence_epochs`, `fence_epoch_source` and `fence_idempotency_keys`,
//!   with a migration history of their own, `_tower_fence_migrations`. A fence looks once where
//!   they are, and names that schema from then on: what a session or a transaction does to its
//!   `search_path` leads no check to other rows.
//! - Durability is the database's. With `synchronous_commit = off`, or after a failover to a
//!   standby that had not received everything, an acknowledged write and its `max_token` are lost
//!   together. Epochs are durable even so: their transactions wait for the disk. (On SQLite that is
//!   `PRAGMA synchronous`: leave it at FULL, its default.)
//! - Rows of resources are never deleted: each resource that was named with an admissible token
//!   keeps one, and, where grants are announced, each that was ever locked. A row that is deleted
//!   by hand forgets what is dead. Records of idempotency keys are removed by
//!   [`Fence::remove_expired_keys`].
//! - A token that is far too high closes its resource: everything below is stale from then on. An
//!   issuer whose grants are announced outranks it; otherwise [`Fence::reset`] takes it back.
//! - A function of the application's may run in each transaction before its writes: see
//!   [`Fence::on_begin`].

mod admission;
mod admitted;
mod conn;
mod database;
mod dead;
mod error;
mod fenced_read;
mod handed_out;
mod hook;
mod limits;
mod loan;
mod lock_side;
#[cfg(feature = "postgres")]
mod postgres;
mod queue;
mod raise;
mod records;
mod replay;
mod reset;
mod session;
#[cfg(feature = "sqlite")]
mod sqlite;
mod statements;
mod tables;
mod tx;
mod write;

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use sqlx::{Pool, migrate::MigrateError};
use tokio::time::Instant;

pub(crate) use self::database::{Fault, fault_of};
pub(crate) use self::fenced_read::ToRaise;
pub(crate) use self::limits::Limits;
pub(crate) use self::loan::{Closed, Loan};
pub(crate) use self::queue::Turn;
pub(crate) use self::records::{RecordId, StoredResponse};
pub(crate) use self::replay::{Claim, Once, OnceError};
pub(crate) use self::write::{Statement, Written, typed};
pub use self::{
    admitted::{Admitted, AllAdmitted},
    database::FenceDatabase,
    error::{AdmitError, CommitError, Stale, WriteError},
    hook::HookFuture,
    reset::ResetError,
    tx::FencedTx,
};
use self::{
    conn::Connections,
    database::AdvisoryLock,
    dead::Dead,
    handed_out::HandedOut,
    hook::Hook,
    limits::deadline,
    queue::{Queues, Wanted},
    session::Session,
    tables::Tables,
};
use crate::{
    metrics,
    token::{Resource, Token},
};

/// How often a token may write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TokenUse {
    /// Once. A repeated request cannot apply twice.
    #[default]
    SingleUse,
    /// As often as its holder likes, until a newer token is seen.
    Reusable,
}

impl TokenUse {
    /// What `max_token` becomes when `token` is admitted.
    const fn floor(self, token: Token) -> i64 {
        match self {
            Self::SingleUse => token.get(),
            Self::Reusable => token.get() - 1,
        }
    }
}

/// The fence: a pool of connections to the database that holds both the fence's rows and the
/// data they protect. Cheap to clone.
pub struct Fence<DB: FenceDatabase> {
    connections: Connections<DB>,
    limits: Limits,
    queues: Arc<Queues>,
    dead: Arc<Dead>,
    /// Known from the first use on.
    tables: Arc<OnceLock<Arc<Tables>>>,
    hook: Hook<DB>,
    handed_out: Arc<HandedOut>,
}

impl<DB: FenceDatabase> Fence<DB> {
    /// A fence over a pool, `Pool<Postgres>` or `Pool<Sqlite>`, with the default limits.
    pub fn new(pool: Pool<DB>) -> Self {
        Self {
            connections: Connections::new(pool),
            limits: Limits::default(),
            queues: Arc::default(),
            dead: Arc::default(),
            tables: Arc::default(),
            hook: Hook::default(),
            handed_out: Arc::default(),
        }
    }

    /// The pool.
    pub fn pool(&self) -> &Pool<DB> {
        self.connections.pool()
    }

    /// Brings the fence's own tables up to date. Safe to call at each start.
    ///
    /// # Errors
    ///
    /// sqlx's error, when the database cannot be reached or refuses.
    pub async fn migrate(&self) -> Result<(), MigrateError> {
        DB::migrate(self.pool()).await?;
        // Where they were made is where they are, whatever becomes of a session's search path.
        let mut conn = self.pool().acquire().await?;
        self.find_tables(&mut conn).await?;
        Ok(())
    }

    /// Says in which schema the tables are (on SQLite: in which database file of the connection).
    /// Default: that in which [`migrate`](Self::migrate) has found them, or the first use: the first
    /// one of the search path that has them.
    ///
    /// A fence has one schema. Where each tenant has a schema with tables of its own, each needs a
    /// fence of its own, too.
    #[must_use]
    pub fn schema(mut self, name: &str) -> Self {
        self.tables = Arc::new(OnceLock::from(Arc::new(Tables::new(name))));
        self
    }

    /// Opens a transaction and admits `token` in it.
    ///
    /// # Errors
    ///
    /// - [`AdmitError::Stale`] when the token is not greater than `max_token`.
    /// - [`AdmitError::Busy`] when the wait for a connection or for the row lock ran out.
    /// - [`AdmitError::Unavailable`] when the database cannot be reached, or its tables are
    ///   missing ([`migrate`](Self::migrate)).
    ///
    /// # Cancel safety
    ///
    /// Dropped at any moment, it leaves no open transaction and no lock behind.
    pub async fn begin(
        &self,
        resource: &Resource,
        token: Token,
        token_use: TokenUse,
    ) -> Result<FencedTx<DB>, AdmitError> {
        let one = AllAdmitted::one(resource.clone(), token);
        self.begin_admitted(one, token_use).await
    }

    /// Opens a transaction and admits one token for each of several resources in it: all of them,
    /// or none.
    ///
    /// The row locks are taken in one order, whatever the order of `tokens`, so that two of these
    /// never wait for each other. They come one after the other, each with a round trip of its own
    /// and with the whole [`lock_wait`](Self::lock_wait).
    ///
    /// Where a resource stands twice, the lower of its tokens is stale; the same token twice counts
    /// once.
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
    /// // … take from the one, give to the other …
    /// tx.commit().await?;
    /// assert_eq!(fence.inspect(&from).await?, Some(42));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin): one stale token refuses the whole, and [`Stale`] says which.
    /// [`AdmitError::NoResource`] when `tokens` is empty.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any moment, it leaves no open transaction and no lock behind.
    pub async fn begin_all(
        &self,
        tokens: &[(Resource, Token)],
        token_use: TokenUse,
    ) -> Result<FencedTx<DB>, AdmitError> {
        let mut named: Vec<Admitted> = Vec::with_capacity(tokens.len());
        for (resource, token) in tokens {
            let one = Admitted::new(resource.clone(), *token);
            if !named.contains(&one) {
                named.push(one);
            }
        }
        let all = AllAdmitted::new(named).ok_or(AdmitError::NoResource)?;
        self.begin_admitted(all, token_use).await
    }

    /// Refuses what this process knows to be dead, without asking the database.
    pub(crate) fn check_dead(&self, all: &AllAdmitted) -> Result<(), Stale> {
        let known = all
            .iter()
            .try_for_each(|one| self.dead.check(&one.resource, one.token));
        if known.is_err() {
            metrics::count("tower_fence_refused_from_memory_total");
        }
        known
    }

    /// Waits for those of this process that write to the same resources, without a connection.
    async fn turns(&self, all: &AllAdmitted) -> Result<Vec<Turn>, AdmitError> {
        self.turns_until(all, deadline(self.limits.lock_wait)).await
    }

    async fn turns_until(
        &self,
        all: &AllAdmitted,
        until: Instant,
    ) -> Result<Vec<Turn>, AdmitError> {
        let mut resources: Vec<_> = all.in_lock_order();
        resources.dedup_by_key(|one| &one.resource);
        let mut turns = Vec::with_capacity(resources.len());
        for one in resources {
            let wanted = Wanted::Resource(one.resource.clone());
            let turn = self.queues.turn(wanted, until).await;
            turns.push(turn.ok_or_else(|| AdmitError::Busy(Arc::new(error::in_use())))?);
        }
        Ok(turns)
    }

    /// Admits `token` in a transaction of the caller's.
    ///
    /// The caller sees to the rest: the transaction is open and runs at READ COMMITTED, its
    /// waits are bounded, its COMMIT is checked, and it is rolled back when this fails. Without
    /// a transaction the check and the write are not one.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin). A serialization failure of a stricter isolation level is
    /// [`AdmitError::Busy`].
    pub async fn admit(
        &self,
        conn: &mut DB::Connection,
        resource: &Resource,
        token: Token,
        token_use: TokenUse,
    ) -> Result<(), AdmitError> {
        let admission = async {
            let tables = self.find_tables(conn).await?;
            let (floor, lock) = (token_use.floor(token), AdvisoryLock::random());
            DB::admit(conn, &tables, resource, token, floor, lock).await
        };
        let admission = admission.await.map_err(session::refusal::<DB>)?;
        // Not remembered: what it has met may be the caller's own, and rolled back.
        admission::admitted(admission, resource, token)?;
        Ok(())
    }

    /// Remembers a refusal.
    fn refused(&self, stale: Stale) -> Stale {
        self.dead.remember(&stale);
        stale
    }

    /// Reads `max_token`: the highest token that is dead; `None` for a resource that was never
    /// seen.
    ///
    /// # Errors
    ///
    /// [`AdmitError::Busy`] or [`AdmitError::Unavailable`], as [`begin`](Self::begin).
    pub async fn inspect(&self, resource: &Resource) -> Result<Option<i64>, AdmitError> {
        // In a transaction, since a pooler in between gives each one a server of its own.
        let mut session = Session::begin(&self.connections, self.limits).await?;
        let tables = self.tables(&mut session).await?;
        session
            .run(async |conn| DB::max_token(conn, &tables, resource).await)
            .await
    }

    /// Where the tables are; looked up once.
    async fn tables(&self, session: &mut Session<DB>) -> Result<Arc<Tables>, AdmitError> {
        match self.tables.get() {
            Some(tables) => Ok(Arc::clone(tables)),
            None => session.run(async |conn| self.find_tables(conn).await).await,
        }
    }

    async fn find_tables(&self, conn: &mut DB::Connection) -> sqlx::Result<Arc<Tables>> {
        if let Some(tables) = self.tables.get() {
            return Ok(Arc::clone(tables));
        }
        let schema = DB::find_schema(conn).await?.ok_or_else(|| {
            let missing = "the fence's tables are in no schema of the search path: call \
                           `Fence::migrate` first";
            sqlx::Error::Configuration(missing.into())
        })?;
        let found = || Arc::new(Tables::new(&schema));
        Ok(Arc::clone(self.tables.get_or_init(found)))
    }

    /// Ends a transaction that is out of reach.
    pub(crate) async fn terminate(&self, lock: Option<AdvisoryLock>) {
        self.connections.terminate(lock, self.limits).await;
    }
}

impl<DB: FenceDatabase> Clone for Fence<DB> {
    fn clone(&self) -> Self {
        Self {
            connections: self.connections.clone(),
            limits: self.limits,
            queues: Arc::clone(&self.queues),
            dead: Arc::clone(&self.dead),
            tables: Arc::clone(&self.tables),
            hook: self.hook.clone(),
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
