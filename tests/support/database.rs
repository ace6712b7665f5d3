//! A fresh database for each test, in Postgres or in SQLite.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use sqlx::{
    AssertSqlSafe, Connection, FromRow, PgConnection, PgExecutor, PgPool, Pool, Postgres, Sqlite,
    postgres::{PgConnectOptions, PgPoolOptions, PgRow},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tower_fence::{Fence, FenceBuilder, fence::FenceDatabase};

use super::{proxy::Proxy, template};

/// A database on which the suites run.
pub trait TestDatabase: FenceDatabase {
    /// Whether the failure of a statement aborts its transaction.
    const ABORTS_ON_ERROR: bool;

    /// Creates a database with the tables of the fence and those of [`TABLES`].
    fn fresh(max_connections: u32) -> impl Future<Output = Fresh<Self>> + Send;

    /// Runs statements. On both databases, the statements refer to the tables of the fence as
    /// `tower_fence.NAME`.
    fn execute(
        conn: &mut Self::Connection,
        sql: &str,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Runs statements that must succeed.
    fn run(conn: &mut Self::Connection, sql: &str) -> impl Future<Output = ()> + Send {
        async move {
            let ran = Self::execute(conn, sql).await;
            ran.unwrap_or_else(|error| panic!("unwrap() of {sql}: {error}"));
        }
    }

    /// Reads one number.
    fn number(
        conn: &mut Self::Connection,
        sql: &str,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// Opens a savepoint, writes `entry` in it, and ends the savepoint in the given way.
    fn nested(
        conn: &mut Self::Connection,
        entry: i64,
        end: Nested,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;
}

#[derive(Clone, Copy)]
pub enum Nested {
    Commit,
    Drop,
    Forget,
}

/// The tables to which the handlers of the tests write.
pub const TABLES: &str = "
    CREATE TABLE ledger (entry BIGINT UNIQUE);
    CREATE TABLE stock (sku TEXT PRIMARY KEY, n BIGINT NOT NULL);
    CREATE TABLE parent (id BIGINT PRIMARY KEY);
    CREATE TABLE child (
        parent BIGINT REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED
    );
";

pub struct Fresh<DB: FenceDatabase> {
    pub pool: Pool<DB>,
    pub url: String,
    guard: Guard,
}

/// Connects a pool of at most this many connections.
pub async fn pool_of(url: &str, connections: u32) -> PgPool {
    let options = PgPoolOptions::new().max_connections(connections);
    options.connect(url).await.unwrap()
}

/// Connects a pool that counts its acquisitions and the connections that return to it.
pub async fn counting_pool(url: &str, connections: u32) -> (PgPool, [Arc<AtomicUsize>; 2]) {
    let counts: [Arc<AtomicUsize>; 2] = Default::default();
    let [taken, released] = counts.clone();
    let options = PgPoolOptions::new().max_connections(connections);
    let options = options.before_acquire(move |_, _| {
        taken.fetch_add(1, SeqCst);
        Box::pin(async { Ok(true) })
    });
    let options = options.after_release(move |_, _| {
        released.fetch_add(1, SeqCst);
        Box::pin(async { Ok(true) })
    });
    (options.connect(url).await.unwrap(), counts)
}

impl<DB: TestDatabase> Fresh<DB> {
    pub fn fence(&self) -> Fence<DB> {
        self.fence_with(|fence| fence)
    }

    /// Returns a fence that reuses connections for successive writes.
    pub fn reusing_fence(&self) -> Fence<DB> {
        self.fence_with(|fence| fence.reuse_connections(true))
    }

    /// Returns a fence whose builder is configured by `set`.
    pub fn fence_with(&self, set: impl FnOnce(FenceBuilder<DB>) -> FenceBuilder<DB>) -> Fence<DB> {
        let pooled = std::env::var("TEST_PGBOUNCER_PORT").is_ok();
        set(Fence::builder().transaction_pooling(pooled)).build(self.pool.clone())
    }

    pub async fn execute(&self, sql: &str) {
        DB::execute(&mut self.pool.acquire().await.unwrap(), sql)
            .await
            .unwrap();
    }

    pub async fn number(&self, sql: &str) -> i64 {
        DB::number(&mut self.pool.acquire().await.unwrap(), sql)
            .await
            .unwrap()
    }

    /// Counts rows, such as `ledger WHERE entry = 1`.
    pub async fn count(&self, rows: &str) -> i64 {
        self.number(&format!("SELECT count(*) FROM {rows}")).await
    }

    /// Returns the number of entries in the ledger.
    pub async fn entries(&self) -> i64 {
        self.count("ledger").await
    }
}

/// Counts the sessions of the database that wait for a lock.
pub const WAITING_FOR_LOCK: &str = "SELECT count(*) FROM pg_stat_activity \
    WHERE datname = current_database() AND wait_event_type = 'Lock'";

impl Fresh<Postgres> {
    /// Waits until a session waits for a lock.
    pub async fn waits_for_lock(&self) {
        eventually!(
            "a session waits for a lock",
            self.number(WAITING_FOR_LOCK).await > 0
        );
    }

    /// Connects a pool for an application under test, through a proxy if there is one.
    pub async fn pool_under_test(&self, proxy: Option<&Proxy>, options: PgPoolOptions) -> PgPool {
        let url = proxy.map_or(self.url.clone(), |proxy| proxy.url(&self.url));
        let connect: PgConnectOptions = url.parse().unwrap();
        let connect = connect.application_name("under-test");
        options.connect_with(connect).await.unwrap()
    }

    /// Counts the sessions of the application under test that meet a condition.
    pub async fn sessions_under_test(&self, condition: &str) -> i64 {
        self.count(&format!(
            "pg_stat_activity WHERE datname = current_database() \
             AND application_name = 'under-test' AND {condition}"
        ))
        .await
    }

    /// Creates a role, and runs statements in which `{role}` is its name. The role is dropped with
    /// the database.
    pub async fn role(&self, rights: &str) -> Role {
        let Guard::Postgres { roles, .. } = &self.guard else {
            unreachable!();
        };
        // Roles belong to the whole server.
        let name = format!("tower_fence_test_{:016x}", rand::random::<u64>());
        roles.lock().unwrap().push(name.clone());
        let rights = rights.replace("{role}", &name);
        self.execute(&format!(
            "CREATE ROLE {name} LOGIN PASSWORD '{name}'; {rights}"
        ))
        .await;
        let mut url = reqwest::Url::parse(&self.url).unwrap();
        url.set_username(&name).unwrap();
        url.set_password(Some(&name)).unwrap();
        let url = url.into();
        Role { name, url }
    }

    pub fn addr(&self) -> SocketAddr {
        let url = reqwest::Url::parse(&self.url).unwrap();
        url.socket_addrs(|| Some(5432)).unwrap()[0]
    }

    /// Reconnects through PgBouncer in transaction mode.
    async fn through_pgbouncer(mut self, port: u16, max_connections: u32) -> Self {
        self.pool.close().await;
        let mut url = reqwest::Url::parse(&self.url).unwrap();
        url.set_port(Some(port)).unwrap();
        let options: PgConnectOptions = url.as_str().parse().unwrap();
        self.pool = PgPoolOptions::new()
            .max_connections(max_connections)
            .acquire_timeout(Duration::from_secs(20))
            // A statement that was prepared on one server connection is unknown on another, so no
            // statement is cached.
            .connect_with(options.statement_cache_capacity(0))
            .await
            .unwrap();
        self
    }
}

/// A role that may connect to the database of a test.
pub struct Role {
    pub name: String,
    pub url: String,
}

impl Role {
    pub async fn connect(&self) -> PgConnection {
        PgConnection::connect(&self.url).await.unwrap()
    }

    pub async fn pool(&self) -> PgPool {
        pool_of(&self.url, 2).await
    }
}

enum Guard {
    Postgres {
        name: String,
        roles: Mutex<Vec<String>>,
    },
    Sqlite {
        _folder: tempfile::TempDir,
    },
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Self::Postgres { name, roles } = self else {
            return;
        };
        let mut drops = vec![format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")];
        let roles = roles.get_mut().unwrap().drain(..);
        drops.extend(roles.map(|role| format!("DROP ROLE IF EXISTS {role}")));
        let drop_it = async move {
            let server = super::variable("TEST_DATABASE_URL");
            for url in [server].into_iter().chain(template::workers()) {
                let mut conn = PgConnection::connect(&url).await?;
                for sql in &drops {
                    let sql = AssertSqlSafe(sql.clone());
                    sqlx::raw_sql(sql).execute(&mut conn).await?;
                }
            }
            Ok::<_, sqlx::Error>(())
        };
        let (done, is_done) = std::sync::mpsc::channel();
        // This uses a separate runtime, because the runtime of the test may be shutting down.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            let _ = runtime.unwrap().block_on(drop_it);
            let _ = done.send(());
        });
        // The wait is bounded, because DROP DATABASE waits for sessions that are connecting, and
        // one of them may belong to the runtime of the test, which is blocked here.
        let _ = is_done.recv_timeout(Duration::from_secs(2));
    }
}

/// Implements the methods that run statements. `$prefix` replaces the schema in the names of the
/// fence's tables.
macro_rules! statements {
    ($prefix:literal) => {
        async fn execute(conn: &mut Self::Connection, sql: &str) -> sqlx::Result<()> {
            let sql = AssertSqlSafe(sql.replace("tower_fence.", $prefix));
            sqlx::raw_sql(sql).execute(conn).await?;
            Ok(())
        }

        async fn number(conn: &mut Self::Connection, sql: &str) -> sqlx::Result<i64> {
            let sql = AssertSqlSafe(sql.replace("tower_fence.", $prefix));
            let row = sqlx::raw_sql(sql).fetch_one(conn).await?;
            sqlx::Row::try_get(&row, 0)
        }

        async fn nested(conn: &mut Self::Connection, entry: i64, end: Nested) -> sqlx::Result<()> {
            let mut nested = conn.begin().await?;
            sqlx::query("INSERT INTO ledger VALUES ($1)")
                .bind(entry)
                .execute(&mut *nested)
                .await?;
            match end {
                Nested::Commit => nested.commit().await?,
                Nested::Drop => drop(nested),
                Nested::Forget => std::mem::forget(nested),
            }
            Ok(())
        }
    };
}

impl TestDatabase for Postgres {
    const ABORTS_ON_ERROR: bool = true;

    async fn fresh(max_connections: u32) -> Fresh<Self> {
        let server = super::variable("TEST_DATABASE_URL");
        let name = format!("tower_fence_test_{:016x}", rand::random::<u64>());
        template::copy(&server, &name).await;
        let mut url = reqwest::Url::parse(&server).unwrap();
        url.set_path(&name);
        let pool = PgPoolOptions::new()
            .max_connections(max_connections)
            .acquire_timeout(Duration::from_secs(20))
            .connect(url.as_str())
            .await
            .unwrap();
        let fresh = Fresh {
            pool,
            url: url.into(),
            guard: Guard::Postgres {
                name,
                roles: Mutex::default(),
            },
        };
        match std::env::var("TEST_PGBOUNCER_PORT") {
            Ok(port) => {
                fresh
                    .through_pgbouncer(port.parse().unwrap(), max_connections)
                    .await
            }
            Err(_) => fresh,
        }
    }

    statements!("tower_fence.");
}

impl TestDatabase for Sqlite {
    const ABORTS_ON_ERROR: bool = false;

    async fn fresh(max_connections: u32) -> Fresh<Self> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("test.db");
        let options = SqliteConnectOptions::new()
            .filename(&file)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // Like the Postgres of the tests, this database does not wait for the disk, which may
            // be busy. No test stops the machine.
            .synchronous(SqliteSynchronous::Off);
        let pool = SqlitePoolOptions::new()
            .max_connections(max_connections)
            .connect_with(options)
            .await
            .unwrap();
        let fresh = Fresh {
            pool,
            url: format!("sqlite://{}", file.display()),
            guard: Guard::Sqlite { _folder: folder },
        };
        fresh.fence().migrate().await.unwrap();
        fresh.execute(TABLES).await;
        fresh
    }

    statements!("tower_fence_");
}

/// Reads one value from Postgres.
pub async fn read<'c, T>(db: impl PgExecutor<'c>, sql: &str) -> T
where
    (T,): for<'r> FromRow<'r, PgRow>,
    T: Send + Unpin,
{
    let value = sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(db);
    value.await.unwrap()
}

/// Checks that a write outside a transaction is immediately visible to another connection.
pub async fn is_autocommitted<DB: TestDatabase>(
    writer: &mut DB::Connection,
    reader: &mut DB::Connection,
    entry: i64,
) {
    DB::execute(writer, &format!("INSERT INTO ledger VALUES ({entry})"))
        .await
        .unwrap();
    let seen = format!("SELECT count(*) FROM ledger WHERE entry = {entry}");
    assert_eq!(DB::number(reader, &seen).await.unwrap(), 1);
}

/// Defines one test per database for each of these functions, which are generic over the database.
#[macro_export]
macro_rules! on_both_databases {
    ($($name:ident),* $(,)?) => {
        mod on_postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name::<sqlx::Postgres>().await;
            })*
        }
        mod on_sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name::<sqlx::Sqlite>().await;
            })*
        }
    };
}

pub use crate::on_both_databases;
