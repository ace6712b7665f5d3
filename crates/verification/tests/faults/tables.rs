//! The tables to which the services write: a state for each resource, and a log of all writes.
//! There is one pair of tables for writes with the fence, and one for writes without the fence.

use sqlx::{AssertSqlSafe, PgConnection, query, query_as};

use crate::history::{Line, State};

/// The tables for writes with the fence, or for writes without the fence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tables {
    /// `fenced` or `unfenced`.
    pub side: &'static str,
}

pub const FENCED: Tables = Tables { side: "fenced" };
pub const UNFENCED: Tables = Tables { side: "unfenced" };

impl Tables {
    pub async fn create(self, conn: &mut PgConnection) -> sqlx::Result<()> {
        let sql = format!(
            "CREATE TABLE {0}_states (
                 resource TEXT PRIMARY KEY, count BIGINT NOT NULL, digest BIGINT NOT NULL, balance BIGINT NOT NULL
             ) WITH (fillfactor = 50);
             CREATE TABLE {0}_log (
                 resource TEXT NOT NULL, entry BIGINT NOT NULL, token BIGINT NOT NULL, position BIGINT NOT NULL
             )",
            self.side
        );
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn).await?;
        Ok(())
    }

    /// Inserts a resource.
    pub async fn add(self, conn: &mut PgConnection, resource: &str) -> sqlx::Result<()> {
        let sql = format!("INSERT INTO {}_states VALUES ($1, 0, 0, 0)", self.side);
        let query = query(AssertSqlSafe(sql)).bind(resource);
        query.execute(conn).await.map(drop)
    }

    /// Returns the statement that writes an entry. The statement adds the entry to the current
    /// state, like `State::with`, or overwrites the state, and adds a line to the log.
    fn statement(self) -> String {
        format!(
            "WITH written AS (
                 UPDATE {0}_states SET count = coalesce($5, count + 1),
                     digest = coalesce($6, (digest * 1000003 + $2) % 2147483647),
                     balance = coalesce($7, balance + $4)
                 WHERE resource = $1 RETURNING count
             ) INSERT INTO {0}_log SELECT $1, $2, $3, count FROM written",
            self.side
        )
    }

    /// Writes an entry. If there is a state `back`, it overwrites the current state.
    pub async fn write(
        self,
        conn: &mut PgConnection,
        resource: &str,
        entry: i64,
        token: i64,
        amount: i64,
        back: Option<State>,
    ) -> sqlx::Result<()> {
        let query = query(AssertSqlSafe(self.statement()))
            .bind(resource)
            .bind(entry)
            .bind(token)
            .bind(amount)
            .bind(back.map(|back| back.count))
            .bind(back.map(|back| back.digest))
            .bind(back.map(|back| back.balance));
        match query.execute(conn).await?.rows_affected() {
            1 => Ok(()),
            _ => Err(sqlx::Error::RowNotFound),
        }
    }

    /// Returns the SQL text of a write that overwrites the state. The name must not contain quotes.
    pub fn write_in_text(self, resource: &str, entry: i64, token: i64, back: State) -> String {
        let numbers = [entry, token, 0, back.count, back.digest, back.balance];
        let statement = self.statement().replace("$1", &format!("'{resource}'"));
        (2..)
            .zip(numbers)
            .fold(statement, |statement, (n, number)| {
                statement.replace(&format!("${n}"), &number.to_string())
            })
    }

    /// Reads the states of these resources in one snapshot.
    pub async fn states(
        self,
        conn: &mut PgConnection,
        resources: &[String],
    ) -> sqlx::Result<Vec<State>> {
        let sql = format!(
            "SELECT count, digest, balance FROM {}_states
                 JOIN unnest($1) WITH ORDINALITY AS asked (resource, n) USING (resource) ORDER BY n",
            self.side
        );
        let rows = query_as(AssertSqlSafe(sql)).bind(resources);
        let rows: Vec<(i64, i64, i64)> = rows.fetch_all(conn).await?;
        let state = |(count, digest, balance)| State {
            count,
            digest,
            balance,
        };
        Ok(rows.into_iter().map(state).collect())
    }

    /// Reads the log of these resources, ordered by resource and position. The number of a resource
    /// is its index in `resources`.
    pub async fn lines(
        self,
        conn: &mut PgConnection,
        resources: &[String],
    ) -> sqlx::Result<Vec<Line>> {
        let sql = format!(
            "SELECT n - 1, entry, token, position FROM {}_log
                 JOIN unnest($1) WITH ORDINALITY AS asked (resource, n) USING (resource) ORDER BY n, position",
            self.side
        );
        let rows = query_as(AssertSqlSafe(sql)).bind(resources);
        let rows: Vec<(i64, i64, i64, i64)> = rows.fetch_all(conn).await?;
        let line = |(resource, entry, token, position)| Line {
            resource: usize::try_from(resource).expect("the number is an index in `resources`"),
            entry,
            token,
            position,
        };
        Ok(rows.into_iter().map(line).collect())
    }
}
