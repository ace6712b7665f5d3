//! [`FenceBuilder`]: the settings of a fence.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use derive_where::derive_where;
use sqlx::{Connection, Pool, pool::PoolOptions};
use tokio::{sync::Semaphore, time::timeout};

use super::{
    Fence,
    conn::{Connections, with_address},
    settings::Limits,
    sql::{FenceDatabase, Names},
};

/// Error returned for a name that cannot be used for the fence's schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a schema name must have 1 to 63 characters of a-z 0-9 _, and must not begin with a digit or pg_"
)]
#[non_exhaustive]
pub struct InvalidSchema;

/// Builder of a [`Fence`] with settings other than the defaults.
///
/// ```
/// # fn build(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tower_fence::Fence;
///
/// let fence = Fence::builder()
///     .schema("shop_fence")?
///     .lock_timeout(Duration::from_secs(2))
///     .build(pool);
/// # let _ = fence;
/// # Ok(())
/// # }
/// ```
#[derive_where(Clone, Debug)]
#[must_use]
pub struct FenceBuilder<DB> {
    limits: Limits,
    schema: Option<String>,
    reuse_connections: Option<bool>,
    failover_detection: bool,
    database: PhantomData<fn() -> DB>,
}

impl<DB: FenceDatabase> FenceBuilder<DB> {
    pub(super) fn new() -> Self {
        Self {
            limits: Limits::default(),
            schema: None,
            reuse_connections: None,
            failover_detection: true,
            database: PhantomData,
        }
    }

    /// Sets the timeout for acquiring a connection from the pool. Default: 5 s.
    ///
    /// The pool's own `acquire_timeout` applies as well; the shorter of the two takes effect.
    pub const fn pool_timeout(mut self, timeout: Duration) -> Self {
        self.limits.pool_timeout = timeout;
        self
    }

    /// Sets the timeout of each wait for a lock. Default: 5 s. Minimum: 1 ms.
    ///
    /// The timeout applies to each of these waits separately: in this process's queue for the
    /// resource, in this process's queue of all writes (only on SQLite), for the row lock, and for
    /// any other lock that a statement of the transaction needs.
    pub const fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.limits.lock_timeout = timeout;
        self
    }

    /// Sets how long a transaction may hold its row locks after it has acquired all of them.
    /// Default: 10 s. Minimum: 1 ms.
    ///
    /// This timeout limits the `on_begin` hook and the handler together. If they take longer,
    /// `FenceLayer` cancels the handler. Postgres also enforces the limit, so that a frozen process
    /// loses its transaction: see *Frozen processes* in
    /// [`deployment`](crate::deployment#connections), also for an exception.
    pub const fn hold_timeout(mut self, timeout: Duration) -> Self {
        self.limits.hold_timeout = timeout;
        self
    }

    /// Sets the timeout for the database's response to BEGIN, COMMIT or a statement of the fence.
    /// Default: 5 s.
    ///
    /// BEGIN and the statements of the fence may take this timeout plus
    /// [`lock_timeout`](Self::lock_timeout), and so may COMMIT on SQLite. For COMMIT on Postgres,
    /// the timeout includes waits for locks, for example those of a deferred foreign key. If the
    /// timeout passes, the outcome of COMMIT is unknown.
    pub const fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.limits.answer_timeout = timeout;
        self
    }

    /// Sets whether connections are reused from write to write without returning to the pool.
    /// Default: no, except for a pool that the fence opens itself ([`connect`](Self::connect)). On
    /// SQLite, this setting has no effect, and connections are never reused.
    ///
    /// Without reuse, each operation acquires a connection from the pool, in the task that needs
    /// it, and returns the connection afterwards. `test_before_acquire`, `before_acquire` and
    /// `after_release` run for each operation, and see the task-locals of the request, with one
    /// exception. If a request is dropped while the pool tests a connection for it, another task
    /// completes the test. Session settings that a handler makes, for example with `SET` without
    /// `LOCAL`, stay in effect until a hook resets them, as with any other use of the pool.
    ///
    /// These hooks cost round trips. Choose `true` if no hook needs to run for each operation, and
    /// if a write may run with the session settings of the previous write. Reuse has these effects:
    ///
    /// - An idle connection is used without a test. If it turns out to be closed, the fence uses
    ///   another one.
    /// - After its write, a connection goes to the first waiter in the queue of this fence. If
    ///   there is no waiter, the connection is kept for 20 ms. It returns to the pool after one
    ///   second at the latest. If other tasks of the application may be waiting for a connection,
    ///   the fence returns one to the pool every ten milliseconds.
    /// - The COMMIT of a transaction also begins the next transaction on the same connection. In a
    ///   write, `now()` may therefore be up to five milliseconds earlier than the request. It is
    ///   never earlier than `now()` in the previous write to the same resource, unless the later
    ///   write waited for the row lock of the earlier one.
    ///
    /// Behind a pooler ([`transaction_pooling`](Self::transaction_pooling)) and on a [distributed
    /// fence](crate::guide::citus), COMMIT begins no further transaction, and a connection returns
    /// to the pool after each transaction.
    pub const fn reuse_connections(mut self, yes: bool) -> Self {
        self.reuse_connections = Some(yes);
        self
    }

    /// Sets whether connections go through a pooler that assigns a server connection to each
    /// transaction, such as PgBouncer with `pool_mode = transaction`. Default: no.
    ///
    /// With this setting, [`Fence::write`] runs in an open transaction, because its statement could
    /// be prepared on one server connection and executed on another. Each transaction begins with
    /// `DEALLOCATE ALL`. Disable sqlx's statement cache, as in [this
    /// example](crate::deployment#pgbouncer).
    pub const fn transaction_pooling(mut self, yes: bool) -> Self {
        self.limits.transaction_pooling = yes;
        self
    }

    /// Sets the schema of the fence's tables and functions. Default on Postgres: `tower_fence`.
    ///
    /// On SQLite the schema is the name of the connection's database: `main` by default, or the
    /// name under which a file was attached. In WAL mode, SQLite does not commit to several files
    /// atomically, so the data must be in the same file. If each tenant has its own schema with its
    /// own tables, each tenant also needs its own `Fence`. The fences can share one pool.
    ///
    /// On Postgres, the schema must contain only the fence, because each migration sets the owners
    /// and the privileges of all objects in the schema. The first migration fails if the schema
    /// already contains tables, functions or types. The name must not be a reserved keyword such as
    /// `user`.
    ///
    /// # Errors
    ///
    /// Returns [`InvalidSchema`] unless the name has 1 to 63 characters of `a-z 0-9 _`, does not
    /// begin with a digit, and does not begin with `pg_`.
    pub fn schema(mut self, name: &str) -> Result<Self, InvalidSchema> {
        let is_plain =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if !(1..=63).contains(&name.len())
            || !name.bytes().all(is_plain)
            || name.as_bytes()[0].is_ascii_digit()
            || name.starts_with("pg_")
        {
            return Err(InvalidSchema);
        }
        self.schema = Some(name.to_owned());
        Ok(self)
    }

    /// Sets whether [`Fence::migrate`] fails if the timeline of the server cannot show a failover.
    /// Default: yes. The setting has an effect only when `migrate` creates the tables.
    ///
    /// From the timeline, the fence detects that a standby was promoted or that the server was
    /// restored. Some [managed databases](crate::guide::failover#managed-databases) hide the
    /// timeline, or keep it when they are restored. There, the fence detects no failover: call
    /// [`Fence::after_failover`] after each promotion and each restore, before any client writes.
    /// Otherwise a confirmed write can be lost.
    pub const fn failover_detection(mut self, yes: bool) -> Self {
        self.failover_detection = yes;
        self
    }

    /// Builds the fence over a pool, `Pool<Postgres>` or `Pool<Sqlite>`.
    #[must_use]
    pub fn build(self, pool: Pool<DB>) -> Fence<DB> {
        let half_of_pool = (pool.options().get_max_connections() as usize / 2).max(1);
        let reuse = self.reuse_connections.unwrap_or(false);
        let names = Names::new(DB::prefix(self.schema.as_deref()));
        Fence {
            connections: Connections::new(pool, reuse, names),
            limits: self.limits,
            queues: Arc::default(),
            blocked_calls: Arc::new(Semaphore::new(half_of_pool)),
            stale: Arc::default(),
            failover_detection: self.failover_detection,
            issued_epochs: Arc::default(),
        }
    }

    /// Opens a pool with the database's default options, such as at most 10 connections, and builds
    /// the fence over it.
    ///
    /// On Postgres, connections are reused from write to write unless
    /// [`reuse_connections`](Self::reuse_connections) is set to `false`.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Fence::connect`].
    pub async fn connect(self, url: &str) -> sqlx::Result<Fence<DB>> {
        let is_own = |scheme: &str| {
            let mut own = DB::URL_SCHEMES.iter();
            own.any(|own| scheme.trim_start().eq_ignore_ascii_case(own))
        };
        if let Some((scheme, _)) = url.split_once("://")
            && !is_own(scheme)
        {
            let schemes = DB::URL_SCHEMES.join(": or ");
            let expected = format!("the URL of the database must begin with {schemes}:");
            return Err(sqlx::Error::Configuration(expected.into()));
        }
        self.connect_with(PoolOptions::new(), url.parse()?).await
    }

    /// Connects like [`connect`](Self::connect), with the given options for the pool and for its
    /// connections.
    ///
    /// If connections are reused, `after_connect` runs for each connection, but `before_acquire`
    /// and `after_release` rarely run between two writes. For an in-memory SQLite database, the
    /// pool has one connection, which stays open unless a transaction on it cannot be ended. On
    /// SQLite, `PRAGMA synchronous` is EXTRA unless the options set it.
    ///
    /// # Errors
    ///
    /// Returns sqlx's error if the database is still unreachable after the pool's
    /// `acquire_timeout`. One more attempt to connect, of at most one second, then determines the
    /// cause.
    pub async fn connect_with(
        mut self,
        pool: PoolOptions<DB>,
        options: <DB::Connection as Connection>::Options,
    ) -> sqlx::Result<Fence<DB>> {
        let (pool, options) = DB::own_pool(pool, options);
        let pool = match pool.connect_with(options.clone()).await {
            Err(sqlx::Error::PoolTimedOut) => return Err(cause_of_timeout::<DB>(&options).await),
            connected => connected?,
        };
        self.reuse_connections.get_or_insert(true);
        Ok(self.build(pool))
    }
}

/// Maximum time of the attempt to connect that determines the cause of a timeout.
const ONE_ATTEMPT: Duration = Duration::from_secs(1);

/// Returns the error of a single attempt to connect, because the timeout of a pool does not contain
/// its cause.
async fn cause_of_timeout<DB: FenceDatabase>(
    options: &<DB::Connection as Connection>::Options,
) -> sqlx::Error {
    let attempt = timeout(ONE_ATTEMPT, DB::Connection::connect_with(options)).await;
    match attempt {
        Ok(Err(error)) => with_address::<DB>(options, error),
        Err(_) => with_address::<DB>(options, sqlx::Error::PoolTimedOut),
        // The database is reachable. For example, the pool's `after_connect` has failed.
        Ok(Ok(_)) => sqlx::Error::PoolTimedOut,
    }
}
