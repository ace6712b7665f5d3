//! Connections and transactions of a database.

use std::sync::OnceLock;

use sqlx::{Connection, Database};

use crate::fence::settings::Limits;

#[trait_variant::make(Send)]
pub(crate) trait Transactions: Database {
    /// Returns the address of the database, without secrets.
    fn address(options: &<Self::Connection as Connection>::Options) -> String;

    /// Whether the transactions run on a server, and therefore continue if their process stops.
    /// Without a server (SQLite), there is one writer at a time, COMMIT waits for readers, and a
    /// database in memory exists only as long as its connections.
    const HAS_SERVER: bool;

    /// Opens a transaction in one round trip.
    async fn begin(conn: &mut Self::Connection, limits: Limits, begin: Begin) -> sqlx::Result<()>;

    /// Reads SQLite's `busy_timeout`, in milliseconds, which [`Self::begin`] changes beyond its
    /// transaction. Returns `None` on Postgres, which has no such setting.
    fn read_busy_timeout(
        _: &mut Self::Connection,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> {
        async { Ok(None) }
    }

    /// Restores SQLite's `busy_timeout` for statements outside of the fence.
    fn restore_busy_timeout(
        _: &mut Self::Connection,
        _: i64,
    ) -> impl Future<Output = sqlx::Result<()>> {
        async { Ok(()) }
    }

    /// Makes sure that the connection responds and has no open transaction. If a `begin` of the
    /// application was dropped, the connection may have an open transaction that sqlx does not
    /// count. A statement in that transaction would not commit by itself. Also configures the
    /// session so that the server cancels a statement whose client has disconnected.
    async fn leave_transaction(conn: &mut Self::Connection) -> sqlx::Result<()>;

    /// Waits until the queued rollbacks are executed. If `beginning` is true, also rolls back a
    /// [`Self::begin`] that did not return. An error means that the connection must be closed.
    async fn finish_rollback(conn: &mut Self::Connection, beginning: bool) -> sqlx::Result<()>;

    /// Checks that the transaction of [`Self::begin`] is intact, and commits it. `Ok` means that
    /// the COMMIT is confirmed. If `begin_next` is true, the next transaction, which must begin
    /// with an admission, may be opened in the same round trip.
    async fn commit(conn: &mut Self::Connection, begin_next: bool) -> sqlx::Result<Committed>;

    /// Switches back to the role that was active when the transaction began.
    fn restore_role(_: &mut Self::Connection, _: &str) -> impl Future<Output = sqlx::Result<()>> {
        async { Ok(()) }
    }

    /// Terminates a transaction that this process can no longer access, together with its session.
    fn terminate(
        _: &mut Self::Connection,
        _: TransactionId,
    ) -> impl Future<Output = sqlx::Result<()>> {
        async { Ok(()) }
    }
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Begin {
    /// BEGIN sets the timeouts.
    WithLimits,
    /// Like `WithLimits`, for statements that only read. On SQLite, they do not take the write
    /// lock.
    ToRead,
    /// The first statement is an admission, which sets the timeouts.
    ForAdmission,
}

/// State of the connection after a confirmed COMMIT.
#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "only Postgres returns some")
)]
pub(crate) enum Committed {
    /// The connection can return to the pool.
    Clean,
    /// The next transaction has begun on the connection, so the connection should be kept.
    Begun,
    /// The connection failed right after the confirmation.
    Broken,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct TransactionId(pub(in crate::fence) i64);

/// Returns the name of the savepoint that marks the transactions of this process. Before COMMIT,
/// the fence checks that the savepoint still exists. The name is random, so that a statement of the
/// application cannot roll back to the savepoint. Such a rollback would undo the admission, and the
/// rest of the transaction could still be committed.
pub(in crate::fence) fn savepoint() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| format!("tower_fence_{:032x}", rand::random::<u128>()))
}
