//! The tables to which the services write: a state for each resource, and a log of all writes.
//! There is one pair of tables for writes with the fence, and one for writes without the fence.

use sqlx::{AssertSqlSafe, PgConnection, Row};

use crate::history::{Line, State};

/// The tables for writes with the fence, or for writes without the fence.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    states: &'static str,
    log: &'static str,
}

pub const FENCED: Tables = Tables {
    states: "fenced_states",
    log: "fenced_log",
};
pub const UNFENCED: Tables = Tables {
    states: "unfenced_states",
    log: "unfenced_log",
};

impl Tables {
    pub async fn create(self, conn: &mut PgConnection) -> sqlx::Result<()> {
        let Self { states, log } = self;
        let sql = format!(
            "CREATE TABLE {states} (
                 resource TEXT PRIMARY KEY, count BIGINT NOT NULL, digest BIGINT NOT NULL, balance BIGINT NOT NULL
             ) WITH (fillfactor = 50);
             CREATE TABLE {log} (
                 resource TEXT NOT NULL, entry BIGINT NOT NULL, token BIGINT NOT NULL, position BIGINT NOT NULL
             )"
        );
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn).await?;
        Ok(())
    }

    /// Inserts a resource.
    pub async fn add(self, conn: &mut PgConnection, resource: &str) -> sqlx::Result<()> {
        let sql = format!("INSERT INTO {} VALUES ($1, 0, 0, 0)", self.states);
        sqlx::query(AssertSqlSafe(sql))
            .bind(resource)
            .execute(conn)
            .await?;
        Ok(())
    }

    /// Adds an entry to the current state, like `State::with`. Returns the position of the entry.
    pub async fn append(
        self,
        conn: &mut PgConnection,
        resource: &str,
        entry: i64,
        amount: i64,
    ) -> sqlx::Result<i64> {
        let sql = format!(
            "UPDATE {} SET count = count + 1, digest = (digest * 1000003 + $2) % 2147483647,
                 balance = balance + $3 WHERE resource = $1 RETURNING count",
            self.states
        );
        let query = sqlx::query(AssertSqlSafe(sql))
            .bind(resource)
            .bind(entry)
            .bind(amount);
        Ok(query.fetch_one(conn).await?.get(0))
    }

    /// Overwrites the state. Returns the position of the last entry.
    pub async fn write_back(
        self,
        conn: &mut PgConnection,
        resource: &str,
        state: State,
    ) -> sqlx::Result<i64> {
        let sql = format!(
            "UPDATE {} SET count = $2, digest = $3, balance = $4 WHERE resource = $1 RETURNING count",
            self.states
        );
        let query = sqlx::query(AssertSqlSafe(sql))
            .bind(resource)
            .bind(state.count);
        let query = query.bind(state.digest).bind(state.balance);
        Ok(query.fetch_one(conn).await?.get(0))
    }

    /// Returns [`write_back`](Self::write_back) and [`log`](Self::log) as SQL text. The name must
    /// not contain quotes.
    pub fn write_back_in_text(
        self,
        resource: &str,
        state: State,
        entry: i64,
        token: i64,
    ) -> String {
        let (
            Self { states, log },
            State {
                count,
                digest,
                balance,
            },
        ) = (self, state);
        format!(
            "UPDATE {states} SET count = {count}, digest = {digest}, balance = {balance} WHERE resource = '{resource}';
             INSERT INTO {log} VALUES ('{resource}', {entry}, {token}, {count})"
        )
    }

    pub async fn log(
        self,
        conn: &mut PgConnection,
        resource: &str,
        entry: i64,
        token: i64,
        position: i64,
    ) -> sqlx::Result<()> {
        let sql = format!("INSERT INTO {} VALUES ($1, $2, $3, $4)", self.log);
        let query = sqlx::query(AssertSqlSafe(sql)).bind(resource).bind(entry);
        query.bind(token).bind(position).execute(conn).await?;
        Ok(())
    }

    /// Reads the states of these resources in one snapshot.
    pub async fn states(
        self,
        conn: &mut PgConnection,
        resources: &[String],
    ) -> sqlx::Result<Vec<State>> {
        let sql = format!(
            "SELECT count, digest, balance FROM {} JOIN unnest($1) WITH ORDINALITY AS asked (resource, n)
                 USING (resource) ORDER BY n",
            self.states
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(resources)
            .fetch_all(conn)
            .await?;
        let state = |row: &sqlx::postgres::PgRow| State {
            count: row.get(0),
            digest: row.get(1),
            balance: row.get(2),
        };
        Ok(rows.iter().map(state).collect())
    }

    /// Reads the log of these resources, ordered by resource and position. The number of a resource
    /// is its index in `resources`.
    pub async fn lines(
        self,
        conn: &mut PgConnection,
        resources: &[String],
    ) -> sqlx::Result<Vec<Line>> {
        let sql = format!(
            "SELECT n - 1, entry, token, position FROM {} JOIN unnest($1) WITH ORDINALITY AS asked (resource, n)
                 USING (resource) ORDER BY n, position",
            self.log
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(resources)
            .fetch_all(conn)
            .await?;
        let line = |row: &sqlx::postgres::PgRow| Line {
            resource: usize::try_from(row.get::<i64, _>(0))
                .expect("the number is an index in `resources`"),
            entry: row.get(1),
            token: row.get(2),
            position: row.get(3),
        };
        Ok(rows.iter().map(line).collect())
    }
}
