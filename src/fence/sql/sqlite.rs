//! Implementation of the fence in SQLite, for a single machine and for evaluation.
//!
//! SQLite allows one writer at a time for the whole file, so the lock of the file serves as the row
//! lock. If a process freezes while it holds the lock, it keeps the lock, because there is no
//! server that could end its transaction.

use std::time::Duration;

use sqlx::{
    AssertSqlSafe, Connection, Executor, SqlSafeStr, Sqlite, SqliteConnection,
    migrate::MigrateError,
    sqlite::{SqliteConnectOptions, SqlitePoolOptions, SqliteRow, SqliteTransactionManager},
};

use super::{
    Admission, Admit, Announcement, Backend, Begin, ClaimOfKey, Claiming, Committed, Dead, Fitness,
    Idle, Names, Record, RecordId, Rows, StateRow, Statement, States, StoredResponse,
    TransactionManager, migrations, savepoint, states::states,
};
use crate::{
    announce::LeaseDigest,
    epochs::{Epoch, partition_of},
    fence::claims::TokenUse,
    token::{Resource, Token},
};

impl Backend for Sqlite {
    fn address(options: &SqliteConnectOptions) -> String {
        options.get_filename().display().to_string()
    }

    fn own_pool(pool: SqlitePoolOptions, options: &SqliteConnectOptions) -> SqlitePoolOptions {
        // An in-memory database is lost when its last connection closes.
        let name = options.get_filename().to_string_lossy();
        match name.contains(":memory:") || name.contains("sqlx-in-memory") {
            true => pool
                .max_connections(1)
                .idle_timeout(None)
                .max_lifetime(None),
            false => pool,
        }
    }

    fn prefix(schema: Option<&str>) -> String {
        // The prefix selects the connection's own file, not an attached file or a temporary table.
        format!("{}.tower_fence_", schema.unwrap_or("main"))
    }

    async fn begin(conn: &mut SqliteConnection, begin: Begin) -> sqlx::Result<()> {
        // IMMEDIATE takes the write lock at the beginning. A deferred transaction that reads first
        // can fail later with SQLITE_BUSY, without waiting. Before COMMIT, the fence checks that
        // the savepoint still exists.
        let lock_timeout = begin.limits().lock_timeout;
        let lock_ms = lock_timeout.as_millis().clamp(1, i32::MAX as u128);
        let sql = format!(
            "PRAGMA busy_timeout = {lock_ms}; BEGIN IMMEDIATE; SAVEPOINT {}",
            savepoint()
        );
        SqliteTransactionManager::begin(conn, Some(AssertSqlSafe(sql).into_sql_str())).await
    }

    async fn lock_wait_of_pool(conn: &mut SqliteConnection) -> sqlx::Result<Option<i64>> {
        let busy_timeout = sqlx::query_scalar("PRAGMA busy_timeout").fetch_one(conn);
        busy_timeout.await.map(Some)
    }

    async fn restore_lock_wait(conn: &mut SqliteConnection, ms: i64) -> sqlx::Result<()> {
        let restore = format!("PRAGMA busy_timeout = {ms}");
        conn.execute(AssertSqlSafe(restore)).await?;
        Ok(())
    }

    async fn check(_: &mut SqliteConnection, _: &Names) -> sqlx::Result<Fitness> {
        Ok(Fitness::Fit)
    }

    async fn abandon_begin(_: &mut SqliteConnection) -> sqlx::Result<()> {
        // sqlx's worker rolls back a BEGIN whose future was dropped.
        Ok(())
    }

    async fn leave_transaction(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        // No transaction is open, because sqlx's worker rolls back a BEGIN whose future was
        // dropped.
        conn.ping().await
    }

    async fn commit(conn: &mut SqliteConnection, _: bool) -> sqlx::Result<Committed> {
        // RELEASE fails if the transaction has already ended, either by a statement (`INSERT OR
        // ROLLBACK`, a full disk) or by an explicit COMMIT or ROLLBACK.
        let release = format!("RELEASE {}", savepoint());
        conn.execute(AssertSqlSafe(release)).await?;
        SqliteTransactionManager::commit(conn).await?;
        Ok(Committed::Clean)
    }

    const HAS_SERVER: bool = false;

    async fn migrate(
        conn: &mut SqliteConnection,
        names: &Names,
        _: bool,
    ) -> Result<(), MigrateError> {
        let table = names.apply("tower_fence.migrations");
        let (file, table) = table.split_once('.').unwrap_or(("main", &table));
        let found = format!("SELECT 1 FROM {file}.sqlite_master WHERE name = '{table}'");
        let has_history = conn.fetch_optional(AssertSqlSafe(found)).await?.is_some();
        migrations::migrate(conn, has_history, names, migrations::SQLITE).await
    }

    fn schema_sql(names: &Names, _: bool) -> String {
        const HISTORY: &str = "    version BIGINT PRIMARY KEY,
    description TEXT NOT NULL,
    installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
    success BOOLEAN NOT NULL,
    checksum BLOB NOT NULL,
    execution_time BIGINT NOT NULL";
        migrations::script(names, migrations::SQLITE, HISTORY, ["X'", "'"])
    }

    async fn admit(
        conn: &mut SqliteConnection,
        names: &Names,
        admit: Admit<'_>,
    ) -> sqlx::Result<Admission> {
        if let admitted @ Admission::Admitted(_) = Self::admit_early(conn, names, admit).await? {
            return Ok(admitted);
        }
        const FIRST: &str = "INSERT INTO tower_fence.resources AS r \
                 (resource, max_token, updated_at, partition) \
             SELECT $1, $3, CURRENT_TIMESTAMP, $4 FROM tower_fence.floors WHERE partition = $4 AND $2 > floor \
             ON CONFLICT (resource) DO NOTHING";
        let first = sqlx::query(names.sql(FIRST))
            .bind(admit.resource.as_str())
            .bind(admit.token.get())
            .bind(admit.raised_to())
            .bind(i16::from(partition_of(admit.resource)))
            .execute(&mut *conn);
        if first.await?.rows_affected() == 1 {
            return Ok(Admission::Admitted(None));
        }
        Ok(Admission::Stale(dead(conn, names, admit.resource).await?))
    }

    async fn admit_only(
        conn: &mut SqliteConnection,
        names: &Names,
        admit: Admit<'_>,
    ) -> sqlx::Result<Admission> {
        Self::admit(conn, names, admit).await
    }

    async fn admit_early(
        conn: &mut SqliteConnection,
        names: &Names,
        admit: Admit<'_>,
    ) -> sqlx::Result<Admission> {
        const ADMIT: &str = "UPDATE tower_fence.resources SET max_token = $3, updated_at = CURRENT_TIMESTAMP \
             WHERE resource = $1 AND max_token < $2";
        let admitted = sqlx::query(names.sql(ADMIT))
            .bind(admit.resource.as_str())
            .bind(admit.token.get())
            .bind(admit.raised_to())
            .execute(conn);
        Ok(match admitted.await?.rows_affected() {
            1 => Admission::Admitted(None),
            _ => Admission::Behind,
        })
    }

    async fn admit_once(
        conn: &mut SqliteConnection,
        names: &Names,
        claim: ClaimOfKey<'_>,
    ) -> sqlx::Result<Claiming> {
        const CLAIM: &str = "INSERT INTO tower_fence.idempotency_keys AS k (scope, key, fingerprint, expires_at) \
             VALUES ($1, $2, $3, CAST(unixepoch('subsec') * 1000 AS INTEGER) + $4) \
             ON CONFLICT (scope, key) DO UPDATE SET fingerprint = excluded.fingerprint, \
                 expires_at = excluded.expires_at, status = NULL, headers = NULL, body = NULL \
             WHERE k.expires_at <= CAST(unixepoch('subsec') * 1000 AS INTEGER)";
        let claimed = sqlx::query(names.sql(CLAIM))
            .bind(&claim.id.scope[..])
            .bind(&claim.id.key)
            .bind(&claim.fingerprint[..])
            .bind(claim.ttl_ms)
            .execute(&mut *conn);
        if claimed.await?.rows_affected() == 0 {
            let found = Self::find_record(conn, names, claim.id).await?;
            return Ok(Claiming::Found(found));
        }
        Ok(Claiming::Claimed {
            role: String::new(),
            admission: Self::admit(conn, names, claim.admit).await?,
        })
    }

    async fn find_record(
        conn: &mut SqliteConnection,
        names: &Names,
        id: &RecordId,
    ) -> sqlx::Result<Option<Record>> {
        const FIND: &str = "SELECT fingerprint, status, headers, body FROM tower_fence.idempotency_keys \
             WHERE scope = $1 AND key = $2 AND expires_at > CAST(unixepoch('subsec') * 1000 AS INTEGER)";
        let row = sqlx::query_as(names.sql(FIND))
            .bind(&id.scope[..])
            .bind(&id.key)
            .fetch_optional(conn)
            .await?;
        Ok(row.map(Record::of))
    }

    async fn store_response(
        conn: &mut SqliteConnection,
        names: &Names,
        id: &RecordId,
        response: &StoredResponse,
    ) -> sqlx::Result<bool> {
        const STORE: &str = "UPDATE tower_fence.idempotency_keys SET status = $3, headers = $4, body = $5 \
             WHERE scope = $1 AND key = $2 AND status IS NULL";
        let stored = sqlx::query(names.sql(STORE))
            .bind(&id.scope[..])
            .bind(&id.key)
            .bind(response.status.cast_signed())
            .bind(&response.headers)
            .bind(&response.body[..])
            .execute(conn)
            .await?;
        Ok(stored.rows_affected() == 1)
    }

    async fn remove_expired(
        conn: &mut SqliteConnection,
        names: &Names,
        at_most: u32,
    ) -> sqlx::Result<u64> {
        const REMOVE: &str = "DELETE FROM tower_fence.idempotency_keys WHERE (scope, key) IN (\
             SELECT scope, key FROM tower_fence.idempotency_keys \
             WHERE expires_at <= CAST(unixepoch('subsec') * 1000 AS INTEGER) ORDER BY expires_at LIMIT $1)";
        let removed = sqlx::query(names.sql(REMOVE)).bind(at_most).execute(conn);
        Ok(removed.await?.rows_affected())
    }

    async fn raise(
        conn: &mut SqliteConnection,
        names: &Names,
        resource: &Resource,
        token: Token,
    ) -> sqlx::Result<Option<Dead>> {
        const RAISE: &str = "INSERT INTO tower_fence.resources AS r \
                 (resource, max_token, updated_at, partition) \
             SELECT $1, $2, CURRENT_TIMESTAMP, $3 FROM tower_fence.floors WHERE partition = $3 \
                 AND ($2 >= floor OR EXISTS (SELECT 1 FROM tower_fence.resources WHERE resource = $1)) \
             ON CONFLICT (resource) DO UPDATE \
                 SET max_token = excluded.max_token, updated_at = excluded.updated_at \
                 WHERE r.max_token < excluded.max_token";
        sqlx::query(names.sql(RAISE))
            .bind(resource.as_str())
            .bind(TokenUse::Reusable.dead(token))
            .bind(i16::from(partition_of(resource)))
            .execute(&mut *conn)
            .await?;
        dead(conn, names, resource).await.map(Some)
    }

    async fn max_token(
        conn: &mut SqliteConnection,
        names: &Names,
        resource: &Resource,
    ) -> sqlx::Result<Option<i64>> {
        let dead = dead(conn, names, resource).await?;
        Ok((dead.max_token > 0 || !dead.by_floor).then_some(dead.max_token))
    }

    // In SQLite, a data-modifying statement cannot be part of another statement.
    const AT_ONCE: bool = false;

    async fn write_at_once(
        _: &mut SqliteConnection,
        _: &Names,
        _: Admit<'_>,
        _: Duration,
        _: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<SqliteRow>> {
        Ok(Vec::new())
    }

    async fn write_admitted(
        conn: &mut SqliteConnection,
        statement: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<SqliteRow>> {
        let sql = format!("WITH fence AS (SELECT 1) {}", statement.sql.as_str());
        sqlx::query_with(AssertSqlSafe(sql), statement.arguments.clone())
            .fetch_all(conn)
            .await
    }

    async fn remove_idle(
        conn: &mut SqliteConnection,
        names: &Names,
        partition: u8,
        idle: Idle,
    ) -> sqlx::Result<u64> {
        // SQLite allows one writer at a time, so no row is inserted between the two statements.
        const REMOVE: &str = "DELETE FROM tower_fence.resources WHERE resource IN (\
                 SELECT resource FROM tower_fence.resources WHERE partition = $1 \
                     AND unixepoch(updated_at) < unixepoch('subsec') - $2 \
                     AND max(max_token, announced) < $4 \
                 LIMIT $3) \
             RETURNING max(max_token, announced)";
        const RAISE: &str = "UPDATE tower_fence.floors SET floor = $2 \
             WHERE partition = $1 AND floor < $2";
        let below = match idle.granted {
            Some(granted) => granted.get() + 1,
            None => {
                let last = Self::last_epoch(conn, names, partition).await?;
                (last.unwrap_or(0) + 1) * Epoch::SIZE
            }
        };
        let below = idle.live.map_or(below, |live| live.get().min(below));
        let removed: Vec<i64> = sqlx::query_scalar(names.sql(REMOVE))
            .bind(i16::from(partition))
            .bind(idle.older_than.as_secs_f64())
            .bind(idle.at_most)
            .bind(below)
            .fetch_all(&mut *conn)
            .await?;
        if let Some(dead) = removed.iter().max() {
            sqlx::query(names.sql(RAISE))
                .bind(i16::from(partition))
                .bind(dead)
                .execute(conn)
                .await?;
        }
        Ok(removed.len() as u64)
    }

    async fn after_failover(
        conn: &mut SqliteConnection,
        names: &Names,
        partition: u8,
    ) -> sqlx::Result<()> {
        // If other partitions have epochs, a partition without an epoch may have lost its epoch.
        const MOVE_UP: &str = "INSERT INTO tower_fence.epochs (partition, epoch) SELECT $1, 500 \
             WHERE EXISTS (SELECT 1 FROM tower_fence.epochs WHERE epoch > 0) \
             ON CONFLICT (partition) DO UPDATE SET epoch = min(epoch + 500, 999999) \
             RETURNING epoch * 1000000000 + 999999999";
        const FLOOR: &str =
            "UPDATE tower_fence.floors SET floor = max(floor, $2) WHERE partition = $1";
        // If the tokens of a row are above the end of the new epoch, or slightly below it, the
        // resource has seen a forged token or a token of another issuer. Later grants of the
        // resource were above that token. The lost commits contain fewer than 500,000 such grants,
        // so the row is raised by that number.
        const ROWS: &str = "UPDATE tower_fence.resources SET max_token = \
             CASE WHEN max(max_token, announced) <= $2 - 500000 THEN $2 \
                 ELSE min(max(max_token, announced) + 500000, 999999999999999) END \
             WHERE partition = $1";
        let dead: Option<i64> = sqlx::query_scalar(names.sql(MOVE_UP))
            .bind(i16::from(partition))
            .fetch_optional(&mut *conn)
            .await?;
        let Some(dead) = dead else { return Ok(()) };
        for raise in [FLOOR, ROWS] {
            sqlx::query(names.sql(raise))
                .bind(i16::from(partition))
                .bind(dead)
                .execute(&mut *conn)
                .await?;
        }
        Ok(())
    }

    async fn announce(
        conn: &mut SqliteConnection,
        names: &Names,
        resource: &Resource,
        token: Token,
        lease: &LeaseDigest,
    ) -> sqlx::Result<Announcement> {
        const ANNOUNCE: &str = "INSERT INTO tower_fence.resources AS r \
                 (resource, max_token, announced, announced_lease, updated_at, partition) \
             SELECT $1, $2 - 1, $2, $3, CURRENT_TIMESTAMP, $4 FROM tower_fence.floors WHERE partition = $4 \
                 AND ($2 > floor OR EXISTS (SELECT 1 FROM tower_fence.resources WHERE resource = $1)) \
             ON CONFLICT (resource) DO UPDATE SET max_token = max(r.max_token, excluded.max_token), \
                 announced = excluded.announced, announced_lease = excluded.announced_lease, \
                 updated_at = excluded.updated_at \
             WHERE r.max_token < $2 \
                 AND (r.announced < $2 OR (r.announced = $2 AND r.announced_lease IS $3))";
        const HIGHEST: &str = "SELECT max(max_token, announced), announced = $2 AND announced_lease IS $3 \
             FROM tower_fence.resources WHERE resource = $1";
        let announced = sqlx::query(names.sql(ANNOUNCE))
            .bind(resource.as_str())
            .bind(token.get())
            .bind(&lease.as_bytes()[..])
            .bind(i16::from(partition_of(resource)))
            .execute(&mut *conn);
        if announced.await?.rows_affected() == 1 {
            return Ok(Announcement::Announced);
        }
        let highest: Option<(i64, bool)> = sqlx::query_as(names.sql(HIGHEST))
            .bind(resource.as_str())
            .bind(token.get())
            .bind(&lease.as_bytes()[..])
            .fetch_optional(&mut *conn)
            .await?;
        let (highest, was_last) = match highest {
            Some(highest) => highest,
            None => (
                Self::floor(conn, names, partition_of(resource)).await?,
                false,
            ),
        };
        Ok(Announcement::Outranked { highest, was_last })
    }

    async fn reset(
        conn: &mut SqliteConnection,
        names: &Names,
        resource: &Resource,
        token: Token,
    ) -> sqlx::Result<i64> {
        const RESET: &str = "UPDATE tower_fence.resources SET max_token = $2, \
             announced_lease = CASE WHEN announced > $2 THEN NULL ELSE announced_lease END, \
             announced = min(announced, $2) WHERE resource = $1";
        // If a resource has no row and the floor blocks it, insert a row, which takes precedence
        // over the floor.
        const MAKE: &str = "INSERT INTO tower_fence.resources (resource, max_token, updated_at, partition) \
             SELECT $1, $2, CURRENT_TIMESTAMP, $3 FROM tower_fence.floors \
             WHERE partition = $3 AND floor > $2";
        let partition = partition_of(resource);
        let announced = Self::announced(conn, names, resource).await?;
        // Ignore a grant of the highest possible token. The forged token that this reset removes
        // may have forced that grant, and a reset is the only remedy.
        let announced = announced.filter(|announced| *announced < Token::MAX.get());
        let last_epoch = Self::last_epoch(conn, names, partition).await?;
        let begun = last_epoch.map_or(0, |epoch| epoch * Epoch::SIZE);
        let granted = announced.unwrap_or(0).max(begun);
        if granted <= token.get() {
            let reset = sqlx::query(names.sql(RESET))
                .bind(resource.as_str())
                .bind(token.get())
                .execute(&mut *conn);
            if reset.await?.rows_affected() == 0 {
                sqlx::query(names.sql(MAKE))
                    .bind(resource.as_str())
                    .bind(token.get())
                    .bind(i16::from(partition))
                    .execute(conn)
                    .await?;
            }
        }
        Ok(granted)
    }

    async fn next_epoch(
        conn: &mut SqliteConnection,
        names: &Names,
        partition: u8,
        at_least: i64,
    ) -> sqlx::Result<i64> {
        const NEXT: &str = "INSERT INTO tower_fence.epochs AS e (partition, epoch) VALUES ($1, $2) \
             ON CONFLICT (partition) DO UPDATE SET epoch = \
                 CASE WHEN e.epoch < excluded.epoch THEN excluded.epoch ELSE e.epoch + 1 END \
             WHERE e.epoch < 999999 RETURNING epoch";
        let begun = sqlx::query_scalar(names.sql(NEXT))
            .bind(i16::from(partition))
            .bind(at_least)
            .fetch_optional(conn)
            .await?;
        // If no epoch is left, return an epoch above the range, which the caller refuses.
        Ok(begun.unwrap_or(Token::MAX.get() / Epoch::SIZE + 1))
    }

    async fn report_epoch(
        conn: &mut SqliteConnection,
        names: &Names,
        partition: u8,
        seen: i64,
    ) -> sqlx::Result<i64> {
        const REPORT: &str = "INSERT INTO tower_fence.epochs AS e (partition, epoch) VALUES ($1, $2) \
             ON CONFLICT (partition) DO UPDATE SET epoch = excluded.epoch WHERE e.epoch < excluded.epoch";
        sqlx::query(names.sql(REPORT))
            .bind(i16::from(partition))
            .bind(seen)
            .execute(&mut *conn)
            .await?;
        Self::floor(conn, names, partition).await
    }
}

/// Reads the highest stale token of a resource.
async fn dead(
    conn: &mut SqliteConnection,
    names: &Names,
    resource: &Resource,
) -> sqlx::Result<Dead> {
    const MAX_TOKEN: &str =
        "SELECT max_token, announced > max_token FROM tower_fence.resources WHERE resource = $1";
    let row = sqlx::query_as(names.sql(MAX_TOKEN))
        .bind(resource.as_str())
        .fetch_optional(&mut *conn)
        .await?;
    Ok(match row {
        Some((max_token, announced)) => Dead {
            max_token,
            by_floor: false,
            announced,
        },
        None => Dead {
            max_token: Sqlite::floor(conn, names, partition_of(resource)).await?,
            by_floor: true,
            announced: false,
        },
    })
}

impl States for Sqlite {
    states!(idle_ms: "CAST((unixepoch('subsec') - unixepoch(updated_at, 'subsec')) * 1000 AS INTEGER)");
}
