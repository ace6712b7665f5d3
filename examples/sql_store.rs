//! A custom lease store: a backend over one SQL table.
//!
//! `cargo run --example sql_store` runs the conformance suite of `tower-fence` with this store.
//!
//! 1. Each resource has one row, which is never deleted, so its token only increases. If the table
//!    is lost or restored from a backup, the store may grant a token twice. To prevent this, keep
//!    the table in the fence's own database, or count tokens within epochs (`Reply::NeedsEpoch`).
//! 2. Each step is a single statement, and therefore atomic.
//! 3. There is no queue, so the driver polls.

use std::{io, time::Duration};

use sqlx::{
    Row, SqlitePool,
    sqlite::{SqlitePoolOptions, SqliteRow},
};
use tower_fence::{
    Resource, Token,
    lease::{
        Backend, Driver, Held, LeaseError, Owner, Page,
        backend::{Ask, Counters, End, Granted, Renewal, Reply, Seen, Step, Waits},
    },
};

/// Leases in a single table.
#[derive(Debug)]
pub struct SqlTable(SqlitePool);

const TABLE: &str = "CREATE TABLE IF NOT EXISTS leases (
    resource TEXT PRIMARY KEY,
    token INTEGER NOT NULL CHECK (token <= 999999999999999),
    -- SHA-256 of the lease id.
    lease BLOB,
    -- The request that was granted the lease; null after several requests under its lease id.
    ticket INTEGER,
    owner TEXT,
    -- In milliseconds, by the database's clock.
    ends INTEGER NOT NULL,
    lock_delay INTEGER NOT NULL
) STRICT";

/// The time of a statement.
macro_rules! now {
    () => {
        "CAST(unixepoch('subsec') * 1000 AS INTEGER)"
    };
}

impl SqlTable {
    /// Creates the table.
    pub async fn new(pool: SqlitePool) -> sqlx::Result<Self> {
        sqlx::query(TABLE).execute(&pool).await?;
        Ok(Self(pool))
    }

    async fn acquire(&self, resource: &Resource, ask: &Ask) -> sqlx::Result<Reply> {
        // If the lease is held under this id, the statement returns its token again. Another lease
        // is replaced only after it has expired and its lock delay has passed.
        const ACQUIRE: &str = concat!(
            "INSERT INTO leases AS l (resource, token, lease, ticket, owner, ends, lock_delay)
             VALUES ($1, 1, $2, $3, $4, ",
            now!(),
            " + $5, $6)
             ON CONFLICT (resource) DO UPDATE SET
                 token = l.token + NOT (l.lease IS $2 AND l.ends > ",
            now!(),
            "),
                 ticket = CASE WHEN l.lease IS $2 AND l.ends > ",
            now!(),
            " AND l.ticket IS NOT $3
                     THEN NULL ELSE $3 END,
                 owner = CASE WHEN l.lease IS $2 AND l.ends > ",
            now!(),
            "
                     THEN coalesce(l.owner, $4) ELSE $4 END,
                 lease = $2, ends = excluded.ends, lock_delay = $6
             WHERE l.ends + l.lock_delay <= ",
            now!(),
            " OR (l.lease IS $2 AND l.ends > ",
            now!(),
            ")
             RETURNING token"
        );
        let granted = sqlx::query(ACQUIRE)
            .bind(resource.as_str())
            .bind(&ask.lease.as_bytes()[..])
            .bind(ask.ticket)
            .bind(ask.owner.as_ref().map(Owner::as_str))
            .bind(millis(ask.ttl))
            .bind(millis(ask.lock_delay))
            .fetch_optional(&self.0)
            .await?;
        if let Some(row) = granted {
            return Ok(Reply::Granted(Granted::new(token(&row)?, ask.ttl)));
        }
        const BLOCKED: &str = concat!(
            "SELECT ends + lock_delay - ",
            now!(),
            " FROM leases WHERE resource = $1"
        );
        let left = sqlx::query_scalar(BLOCKED).bind(resource.as_str());
        let left: Option<i64> = left.fetch_optional(&self.0).await?;
        Ok(Reply::Held {
            left: duration(left.unwrap_or(0)),
        })
    }

    async fn renew(&self, resource: &Resource, renewal: &Renewal) -> sqlx::Result<Reply> {
        const RENEW: &str = concat!(
            "UPDATE leases SET ends = ",
            now!(),
            " + $3, token = max(token + $4, $5)
             WHERE resource = $1 AND lease = $2 AND ends > ",
            now!(),
            "
             RETURNING token"
        );
        let renewed = sqlx::query(RENEW)
            .bind(resource.as_str())
            .bind(&renewal.lease.as_bytes()[..])
            .bind(millis(renewal.ttl))
            .bind(i64::from(renewal.new_token))
            .bind(renewal.at_least.map_or(0, Token::get))
            .fetch_optional(&self.0)
            .await?;
        Ok(match renewed {
            Some(row) => Reply::Granted(Granted::new(token(&row)?, renewal.ttl)),
            None => Reply::Lost,
        })
    }

    async fn end(&self, resource: &Resource, end: &End) -> Result<Reply, LeaseError> {
        // The lease is selected by its id (a release), by its id and the request (an abandon), by
        // its token, or without a condition (a break).
        const END: &str = concat!(
            "UPDATE leases SET lease = NULL, ticket = NULL, owner = NULL, ends = ",
            now!(),
            ", lock_delay = 0
             WHERE resource = $1 AND CASE WHEN $2 IS NULL
                 THEN ends + lock_delay > ",
            now!(),
            " AND ($4 IS NULL OR token = $4)
                 ELSE lease = $2 AND ends > ",
            now!(),
            " AND ($3 IS NULL OR ticket = $3) END"
        );
        let (lease, ticket, token) = match end {
            End::Release(lease) => (Some(lease), None, None),
            End::Abandon { lease, ticket } => (Some(lease), Some(*ticket), None),
            End::Break(token) => (None, None, token.map(Token::get)),
            _ => return Err(unsupported()),
        };
        let ended = sqlx::query(END)
            .bind(resource.as_str())
            .bind(lease.map(|lease| &lease.as_bytes()[..]))
            .bind(ticket)
            .bind(token)
            .execute(&self.0)
            .await
            .map_err(LeaseError::unavailable)?;
        Ok(match ended.rows_affected() {
            0 => Reply::Lost,
            _ => Reply::Ended,
        })
    }

    /// Returns the leases that are held on this resource, or on resources with greater names.
    async fn held(
        &self,
        is: &str,
        after: &str,
        limit: usize,
    ) -> sqlx::Result<Vec<(Resource, Held)>> {
        const HELD: &str = concat!(
            "SELECT resource, token, owner, ends - ",
            now!(),
            " AS left FROM leases
             WHERE lease IS NOT NULL AND ends > ",
            now!(),
            " AND (resource = $1 OR resource > $2)
             ORDER BY resource LIMIT $3"
        );
        let rows = sqlx::query(HELD).bind(is).bind(after);
        let rows = rows.bind(i64::try_from(limit).unwrap_or(i64::MAX));
        let rows = rows.fetch_all(&self.0).await?;
        let held = rows.iter().filter_map(|row| {
            let owner: Option<String> = row.get("owner");
            let held = Held::new(
                Token::new(row.get("token")).ok()?,
                duration(row.get("left")),
            );
            let held = held.owner(owner.and_then(|owner| Owner::new(owner).ok()));
            Some((Resource::new(row.get::<String, _>("resource")).ok()?, held))
        });
        Ok(held.collect())
    }
}

impl Backend for SqlTable {
    async fn step(
        &self,
        resource: &Resource,
        step: Step<'_>,
        _: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        let reply = match step {
            // This store has no queue, so it handles a waiting request like any other.
            Step::Acquire(ask, Waits::No | Waits::Yes { .. } | Waits::Leaves) => {
                self.acquire(resource, ask).await
            }
            Step::Renew(renewal) => self.renew(resource, renewal).await,
            Step::End(end) => return self.end(resource, end).await,
            _ => return Err(unsupported()),
        };
        match reply {
            // The statement would have exceeded the highest token, and has changed nothing.
            Err(sqlx::Error::Database(error)) if error.is_check_violation() => {
                Ok(Reply::Exhausted(Token::MAX.get()))
            }
            reply => reply.map_err(LeaseError::unavailable),
        }
    }

    async fn inspect(&self, resource: &Resource, _: Seen<'_>) -> Result<Option<Held>, LeaseError> {
        // If the resource is not leased, the result has the next one.
        let held = self.held(resource.as_str(), resource.as_str(), 1).await;
        let mut held = held.map_err(LeaseError::unavailable)?.into_iter();
        let held = held.find(|(name, _)| name == resource);
        Ok(held.map(|(_, held)| held))
    }

    async fn page(
        &self,
        limit: usize,
        cursor: Option<&str>,
        _: Counters<'_>,
    ) -> Result<Page, LeaseError> {
        let after = match cursor {
            None => "",
            Some(cursor) => cursor
                .strip_prefix("after:")
                .ok_or_else(LeaseError::invalid_cursor)?,
        };
        let limit = limit.max(1);
        let held = self.held("", after, limit).await;
        let held = held.map_err(LeaseError::unavailable)?;
        let last = held.last().filter(|_| held.len() == limit);
        let cursor = last.map(|(resource, _)| format!("after:{resource}"));
        Ok(Page::new(held, cursor))
    }
}

fn token(row: &SqliteRow) -> sqlx::Result<Token> {
    Token::new(row.get("token")).map_err(|error| sqlx::Error::Decode(error.into()))
}

/// Error for a step that a later version of the driver may send.
fn unsupported() -> LeaseError {
    LeaseError::misconfigured(io::Error::from(io::ErrorKind::Unsupported))
}

fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

fn duration(ms: i64) -> Duration {
    Duration::from_millis(ms.try_into().unwrap_or(0))
}

/// The conformance suite over this store.
pub mod checked {
    use tower_fence::lease::conformance::Subject;

    use super::{Driver, SqlTable, SqlitePoolOptions};

    /// Creates a table in memory for each check.
    #[derive(Debug)]
    pub struct Table;

    impl Subject for Table {
        type Leases = Driver<SqlTable>;
        const QUEUE: bool = false;

        async fn fresh(&self) -> (Driver<SqlTable>, Driver<SqlTable>) {
            let pool = SqlitePoolOptions::new().max_connections(1);
            let pool = pool.connect("sqlite::memory:").await.expect("a database");
            let table = async || Driver::over(SqlTable::new(pool.clone()).await.expect("a table"));
            (table().await, table().await)
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    tower_fence::lease::conformance::run(&checked::Table).await;
    println!("this store passes the conformance suite");
}
