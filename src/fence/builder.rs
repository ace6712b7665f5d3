//! The settings of a fence.

use std::{sync::Arc, time::Duration};

use super::{
    Fence,
    settings::Limits,
    sql::{FenceDatabase, Names},
};

/// A name that cannot be that of the fence's schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a schema name must have 1 to 63 characters of a-z 0-9 _, and must not begin with a digit or pg_"
)]
#[non_exhaustive]
pub struct InvalidSchema;

impl<DB: FenceDatabase> Fence<DB> {
    /// How long to wait for a connection of the pool. Default: 5 s.
    ///
    /// The pool's own `acquire_timeout` applies as well; the shorter of the two decides.
    #[must_use]
    pub const fn pool_wait(mut self, limit: Duration) -> Self {
        self.limits.pool_wait = limit;
        self
    }

    /// The timeout of each wait for a lock: in the queue of this process for the resource, for the row
    /// lock, and for any other lock that a statement of the transaction needs. Default: 5 s each. At least
    /// 1 ms.
    #[must_use]
    pub const fn lock_wait(mut self, limit: Duration) -> Self {
        self.limits.lock_wait = limit;
        self
    }

    /// How long a transaction may hold its row locks once it has all of them. Default: 10 s. At least 1 ms.
    ///
    /// It bounds the whole: the hooks at BEGIN and the handler together. `FenceLayer` ends a handler that takes
    /// longer. On Postgres the server does so as well, so that a process that is frozen loses its transaction: it ends
    /// one that is idle for a second longer than this, and a statement that takes longer than this and
    /// [`lock_wait`](Self::lock_wait) together. From Postgres 17 on, it also ends a transaction that takes a second
    /// longer than all of its waits may: [`lock_wait`](Self::lock_wait) and [`answer_wait`](Self::answer_wait) for each
    /// resource and for the idempotency key, this limit, and [`answer_wait`](Self::answer_wait) for COMMIT.
    #[must_use]
    pub const fn hold_limit(mut self, limit: Duration) -> Self {
        self.limits.hold = limit;
        self
    }

    /// How long to wait for the database's answer to BEGIN, COMMIT or a statement of the fence,
    /// beyond the wait for locks. Default: 5 s.
    #[must_use]
    pub const fn answer_wait(mut self, limit: Duration) -> Self {
        self.limits.answer_wait = limit;
        self
    }

    /// Whether connections go from write to write, past the pool. Default: no.
    ///
    /// By default each use takes a connection from the pool, in the task that asks, and gives it back
    /// afterwards: `test_before_acquire`, `before_acquire` and `after_release` see each one, and find
    /// the task-locals of the request. (Where a request is dropped while a connection is tested for
    /// it, another task sees that through, without them; nobody uses that connection before it is
    /// taken again.) What a handler sets on its session, as by `SET` without `LOCAL`, stays until a
    /// hook resets it, as with any use of the pool.
    ///
    /// These hooks cost round trips. Choose `true` if no hook has to see each use, and if the next write may
    /// see the session settings that one write leaves. Then:
    ///
    /// - An idle connection is taken untested, since BEGIN is as good a test as a ping: where it
    ///   turns out to be dead, another one is taken.
    /// - After its write, a connection goes to the first waiter in the queue of this fence. If there is none,
    ///   it is kept for 20 ms. Waiters are served in order, and the pool
    ///   is asked in another task. The pool sees a connection again after a second at most. While
    ///   others of the application may be waiting for one, the pool gets one back every ten
    ///   milliseconds.
    /// - On Postgres the next transaction begins with the COMMIT of the one before on the same
    ///   connection. `now()` in a write may so be up to five milliseconds older than its request. It
    ///   is never older than that of the last write to the same resource, unless it waited for that
    ///   one's lock. Where the answer to COMMIT takes longer than that, another one begins.
    ///
    /// Set this before the fence is cloned: its clones share the kept connections.
    #[must_use]
    pub fn reuse_connections(mut self, yes: bool) -> Self {
        self.connections = self.connections.reusing(yes);
        self
    }

    /// Whether a pooler that gives each transaction a server of its own stands between this process
    /// and Postgres, as PgBouncer with `pool_mode = transaction`. Default: no.
    ///
    /// Then no transaction begins before its request, and [`write`](Self::write) runs in an open
    /// transaction, since its statement could be prepared on one server and executed on another. Each transaction
    /// begins with `DEALLOCATE ALL`, since other clients may have left statements of the same names.
    /// sqlx's cache of statements has to be off: `PgConnectOptions::statement_cache_capacity(0)`.
    #[must_use]
    pub const fn transaction_pooling(mut self, yes: bool) -> Self {
        self.connections.transaction_pooling = yes;
        self.limits.shared_session = yes;
        self
    }

    /// Sets the schema of the fence's tables and functions. On Postgres it is a schema, by default
    /// `tower_fence`. On SQLite it is the name of the connection's database, by default `main`, or the name
    /// under which a file was attached.
    ///
    /// If each tenant has a schema with tables of its own, each needs a fence of its own, too: it shares
    /// the pool with this one, and no cache.
    ///
    /// # Errors
    ///
    /// [`InvalidSchema`] unless the name has 1 to 63 characters of `a-z 0-9 _`, does not begin with a
    /// digit, and does not begin with `pg_`.
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
        self.names = Arc::new(Names::new(DB::prefix(Some(name))));
        self.checked = Arc::default();
        self.queues = Arc::default();
        self.stale = Arc::default();
        self.handed_out = Arc::default();
        Ok(self)
    }

    /// Whether [`migrate`](Self::migrate) demands that Postgres shows its timeline, by which the fence
    /// notices that a standby was promoted or that the server was restored. Default: yes.
    ///
    /// Some services keep `pg_walfile_name` from their customers. Without it the fence notices no
    /// failover: after each promotion and each restore, [`after_failover`](Self::after_failover) has to
    /// be called before any client writes, or a confirmed write can be lost.
    #[must_use]
    pub const fn failover_detection(mut self, yes: bool) -> Self {
        self.failover_detection = yes;
        self
    }

    pub(crate) const fn limits(&self) -> Limits {
        self.limits
    }
}
