//! A standby of a Postgres server, which a test can promote.

use sqlx::{Connection, Postgres};

use crate::{
    database::TestDatabase,
    eventually,
    postgres::PostgresServer,
    proxy::{Link, Proxy},
};

/// The kind of replication, which determines when the server confirms a COMMIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replication {
    /// The server waits only for its own disk.
    Asynchronous,
    /// The server waits for its own disk and for the standby.
    Synchronous,
}

/// A hot standby: it replays the log of the primary server, and accepts reads.
pub struct Standby {
    pub server: PostgresServer,
    /// The proxy through which the standby receives the log.
    link: Proxy,
}

impl Standby {
    /// Creates a standby of a running server, and waits until it has caught up.
    pub async fn of(primary: &PostgresServer, replication: Replication) -> Self {
        let link = Proxy::to(primary.addr()).await;
        let server = primary.copy(link.addr, &["--write-recovery-conf"]).await;
        let server = server.start_on_a_free_port().await;
        let standby = Self { server, link };
        if replication == Replication::Synchronous {
            execute(primary, "ALTER SYSTEM SET synchronous_standby_names = '*'").await;
            execute(primary, "SELECT pg_reload_conf()").await;
            eventually("the primary waits for its standby", async || {
                let waits = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
                number(primary, waits).await == 1
            })
            .await;
        }
        standby.catch_up(primary).await;
        standby
    }

    /// Waits until the standby has replayed everything that the primary wrote before this call.
    pub async fn catch_up(&self, primary: &PostgresServer) {
        let mark = "SELECT (pg_logical_emit_message(true, 'tests', '') - '0/0')::bigint";
        let mark = number(primary, mark).await;
        let replayed = "SELECT (pg_last_wal_replay_lsn() - '0/0')::bigint";
        eventually!(
            "the standby catches up",
            number(&self.server, replayed).await >= mark
        );
    }

    /// Stops the replication.
    pub fn hold_back(&self) {
        self.link.set(Link::Silent);
    }

    /// Promotes the standby. Changes that were held back are lost.
    pub async fn promote(self) -> PostgresServer {
        self.link.set(Link::Cut);
        let promoted = "SELECT pg_promote(true, 60)::int::bigint";
        assert_eq!(number(&self.server, promoted).await, 1);
        self.server
    }
}

/// Runs a statement on the database `postgres`.
pub async fn execute(server: &PostgresServer, sql: &str) {
    let mut conn = server.connect().await;
    Postgres::run(&mut conn, sql).await;
    conn.close().await.unwrap();
}

/// Reads a number from the database `postgres`.
pub async fn number(server: &PostgresServer, sql: &str) -> i64 {
    let mut conn = server.connect().await;
    let number = Postgres::number(&mut conn, sql).await.unwrap();
    conn.close().await.unwrap();
    number
}
