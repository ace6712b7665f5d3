//! Databases with a given number of rows in `tower_fence.resources`.

use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, Row, postgres::PgPoolOptions};
use tower_fence::Fence;

use super::client::HIGHEST_AT_FIRST;
use crate::support::{options::Options, postgres::PostgresServer};

pub struct Table {
    /// The name of the database.
    pub name: String,
    pub rows: usize,
    url: String,
    has_floors: bool,
    test_connections: bool,
}

/// Statistics of the table in Postgres.
pub struct State {
    pub rows: usize,
    pub table_mib: f64,
    pub index_mib: f64,
    pub dead: i64,
    pub updates: i64,
    pub hot_updates: i64,
    pub vacuums: i64,
}

impl State {
    /// Returns the names of the columns of [`row`](Self::row).
    pub fn columns() -> Vec<String> {
        let columns = [
            "table",
            "rows",
            "table MiB",
            "index MiB",
            "dead",
            "updates",
            "HOT",
            "vacuums",
        ];
        columns.map(str::to_owned).to_vec()
    }

    pub fn row(&self, name: &str) -> Vec<String> {
        let hot = 100.0 * self.hot_updates as f64 / self.updates.max(1) as f64;
        vec![
            name.to_owned(),
            self.rows.to_string(),
            format!("{:.2}", self.table_mib),
            format!("{:.2}", self.index_mib),
            self.dead.to_string(),
            self.updates.to_string(),
            format!("{hot:.2} %"),
            self.vacuums.to_string(),
        ]
    }
}

impl Table {
    /// Creates the fence's tables, without rows.
    pub async fn migrated(server: &PostgresServer, name: &str, options: &Options) -> Self {
        let table = Self::empty(server, name, options).await;
        let pool = table.pool().await;
        let fence = Fence::new(pool.clone());
        fence.migrate().await.expect("the fence's tables");
        pool.close().await;
        table
    }

    /// Creates a table without floors, epochs or leases. It is sufficient to measure the check
    /// alone.
    pub async fn without_floors(server: &PostgresServer, name: &str, options: &Options) -> Self {
        const SCHEMA: &str = "CREATE SCHEMA tower_fence; \
            CREATE TABLE tower_fence.resources (\
                resource text COLLATE \"C\" PRIMARY KEY CHECK (octet_length(resource) BETWEEN 1 AND 255), \
                max_token bigint NOT NULL CHECK (max_token BETWEEN 0 AND 999999999999999), \
                updated_at timestamptz NOT NULL DEFAULT now()\
            ) WITH (fillfactor = 70)";
        let mut table = Self::empty(server, name, options).await;
        table.has_floors = false;
        let pool = table.pool().await;
        let made = sqlx::raw_sql(SCHEMA).execute(&pool).await;
        made.expect("the table");
        pool.close().await;
        table
    }

    /// Creates this many rows, as if each resource had just been written to.
    ///
    /// The partition of a row has no effect on the measurement.
    pub async fn fill(&mut self, rows: usize) {
        let [columns, values] = match self.has_floors {
            true => [
                ", partition, history",
                ", n % 256, tower_fence.current_history()",
            ],
            false => ["", ""],
        };
        let pool = self.pool().await;
        sqlx::query(AssertSqlSafe(format!(
            "INSERT INTO tower_fence.resources (resource, max_token{columns}) \
             SELECT 'resource-' || n, 1 + floor(random() * $2)::bigint{values} \
             FROM generate_series(0, $1 - 1) n"
        )))
        .bind(i64::try_from(rows).expect("not so many"))
        .bind(HIGHEST_AT_FIRST as f64)
        .execute(&pool)
        .await
        .expect("the rows");
        self.rows = rows;
        let vacuumed = sqlx::raw_sql("VACUUM ANALYZE tower_fence.resources");
        vacuumed.execute(&pool).await.expect("it was vacuumed");
        pool.close().await;
    }

    async fn empty(server: &PostgresServer, name: &str, options: &Options) -> Self {
        let mut conn = server.connect().await;
        let create = AssertSqlSafe(format!("CREATE DATABASE {name}"));
        let created = sqlx::raw_sql(create).execute(&mut conn).await;
        created.expect("a database");
        Self {
            name: name.to_owned(),
            rows: 0,
            url: server.url(name),
            has_floors: true,
            test_connections: options.test_connections,
        }
    }

    pub async fn pool(&self) -> PgPool {
        let pool = PgPoolOptions::new()
            .max_connections(16)
            .test_before_acquire(self.test_connections);
        pool.connect(&self.url).await.expect("postgres answers")
    }

    /// Makes a checkpoint of the whole server.
    pub async fn checkpoint(&self) {
        let pool = self.pool().await;
        let done = sqlx::raw_sql("CHECKPOINT").execute(&pool).await;
        done.expect("a checkpoint");
        pool.close().await;
    }

    /// Returns the statistics of the table.
    ///
    /// The statistics are up to date only after the connections of the writers are closed.
    pub async fn state(&self) -> State {
        let conn = PgConnection::connect(&self.url).await;
        let mut conn = conn.expect("postgres answers");
        let row = sqlx::query(
            "SELECT sum(pg_table_size(relid)) / 1048576.0::float8, \
                    sum(pg_indexes_size(relid)) / 1048576.0::float8, \
                    sum(n_dead_tup)::bigint, sum(n_tup_upd)::bigint, sum(n_tup_hot_upd)::bigint, \
                    sum(autovacuum_count)::bigint \
             FROM pg_stat_user_tables WHERE relid = 'tower_fence.resources'::regclass",
        )
        .fetch_one(&mut conn)
        .await
        .expect("the table is there");
        State {
            rows: self.rows,
            table_mib: row.get(0),
            index_mib: row.get(1),
            dead: row.get(2),
            updates: row.get(3),
            hot_updates: row.get(4),
            vacuums: row.get(5),
        }
    }

    /// Checks that every acknowledged write is in the table, and that no row was added.
    pub async fn check(&self, last: impl Iterator<Item = (usize, i64)>) {
        let pool = self.pool().await;
        let (resources, tokens): (Vec<String>, Vec<i64>) = last
            .map(|(row, token)| (format!("resource-{row}"), token))
            .unzip();
        let right: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM unnest($1, $2) AS last (resource, token) \
             JOIN tower_fence.resources f ON f.resource = last.resource AND f.max_token = last.token",
        )
        .bind(&resources)
        .bind(&tokens)
        .fetch_one(&pool)
        .await
        .expect("a count");
        assert_eq!(usize::try_from(right), Ok(tokens.len()), "a write is lost");
        let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM tower_fence.resources")
            .fetch_one(&pool)
            .await
            .expect("a count");
        assert_eq!(usize::try_from(rows), Ok(self.rows));
        pool.close().await;
    }
}
