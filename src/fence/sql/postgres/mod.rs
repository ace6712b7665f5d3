//! Implementation of the fence in Postgres.
//!
//! The SQL functions in `migrations/postgres` implement the rules of the fence. To admit the token
//! of a resource that has a row, the fence sends one prepared `UPDATE`. If the `UPDATE` admits no
//! token, and for every other operation, the fence calls a function.

mod admit;
mod at_once;
mod check;
mod keys;
mod left_open;
mod migrate;
mod transaction;

use std::time::Duration;

use sqlx::{
    AssertSqlSafe, PgConnection, Postgres,
    migrate::MigrateError,
    postgres::{PgConnectOptions, PgRow},
};

use super::{
    Admission, Admit, Announcement, Backend, Begin, ClaimOfKey, Claiming, Committed, Dead, Fitness,
    Idle, Names, Record, RecordId, Rows, StateRow, Statement, States, StoredResponse,
    TransactionId, states::states,
};
use crate::{
    announce::LeaseDigest,
    token::{Resource, Token},
};

impl Backend for Postgres {
    fn address(options: &PgConnectOptions) -> String {
        match options.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", options.get_host(), options.get_port()),
        }
    }

    fn prefix(schema: Option<&str>) -> String {
        format!("{}.", schema.unwrap_or("tower_fence"))
    }

    async fn begin(conn: &mut PgConnection, begin: Begin) -> sqlx::Result<()> {
        transaction::begin(conn, begin).await
    }

    async fn check(conn: &mut PgConnection, names: &Names) -> sqlx::Result<Fitness> {
        check::check(conn, names).await
    }

    async fn leave_transaction(conn: &mut PgConnection) -> sqlx::Result<()> {
        left_open::leave(conn).await
    }

    async fn abandon_begin(conn: &mut PgConnection) -> sqlx::Result<()> {
        // BEGIN may have been sent although sqlx has not counted it. If the connection returned to
        // the pool now, the transaction would stay open.
        left_open::end(conn).await
    }

    async fn commit(conn: &mut PgConnection, begin_next: bool) -> sqlx::Result<Committed> {
        transaction::commit(conn, begin_next).await
    }

    const HAS_SERVER: bool = true;

    async fn migrate(
        conn: &mut PgConnection,
        names: &Names,
        failover_detection: bool,
    ) -> Result<(), MigrateError> {
        migrate::migrate(conn, names, failover_detection).await
    }

    fn schema_sql(names: &Names, failover_detection: bool) -> String {
        migrate::script(names, failover_detection)
    }

    async fn admit(
        conn: &mut PgConnection,
        names: &Names,
        admit: Admit<'_>,
    ) -> sqlx::Result<Admission> {
        admit::admit(conn, names, admit).await
    }

    async fn admit_only(
        conn: &mut PgConnection,
        names: &Names,
        admit: Admit<'_>,
    ) -> sqlx::Result<Admission> {
        admit::admit_only(conn, names, admit).await
    }

    async fn admit_early(
        conn: &mut PgConnection,
        names: &Names,
        admit: Admit<'_>,
    ) -> sqlx::Result<Admission> {
        admit::admit_early(conn, names, admit).await
    }

    async fn admit_once(
        conn: &mut PgConnection,
        names: &Names,
        claim: ClaimOfKey<'_>,
    ) -> sqlx::Result<Claiming> {
        keys::admit_once(conn, names, claim).await
    }

    async fn find_record(
        conn: &mut PgConnection,
        names: &Names,
        id: &RecordId,
    ) -> sqlx::Result<Option<Record>> {
        keys::find(conn, names, id).await
    }

    async fn restore_role(conn: &mut PgConnection, role: &str) -> sqlx::Result<()> {
        keys::restore_role(conn, role).await
    }

    async fn store_response(
        conn: &mut PgConnection,
        names: &Names,
        id: &RecordId,
        response: &StoredResponse,
    ) -> sqlx::Result<bool> {
        keys::store(conn, names, id, response).await
    }

    async fn remove_expired(
        conn: &mut PgConnection,
        names: &Names,
        at_most: u32,
    ) -> sqlx::Result<u64> {
        keys::remove_expired(conn, names, at_most).await
    }

    async fn terminate(conn: &mut PgConnection, id: TransactionId) -> sqlx::Result<()> {
        // Do not terminate a session whose COMMIT waits for a synchronous standby. The writes would
        // become visible on this server, although a failover could lose them. The statement is sent
        // as one message, because a pooler may prepare a statement on one server connection and
        // execute it on another.
        let terminate = format!(
            "SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity AS a \
             WHERE a.backend_xid = '{}'::xid8::xid AND a.wait_event IS DISTINCT FROM 'SyncRep'",
            id.0
        );
        sqlx::raw_sql(AssertSqlSafe(terminate))
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn catch_up(
        conn: &mut PgConnection,
        names: &Names,
        resource: &Resource,
    ) -> sqlx::Result<bool> {
        sqlx::query_scalar(names.sql("SELECT tower_fence.catch_up($1)"))
            .bind(resource.as_str())
            .fetch_one(conn)
            .await
    }

    async fn after_failover(
        conn: &mut PgConnection,
        names: &Names,
        partition: u8,
    ) -> sqlx::Result<()> {
        if names.is_distributed() {
            // Update all partitions together, because each worker has rows of all partitions.
            if partition == 0 {
                let all = sqlx::query(names.sql("SELECT tower_fence.after_failover()"));
                all.execute(conn).await?;
            }
            return Ok(());
        }
        sqlx::query(names.sql("SELECT tower_fence.after_failover_of($1)"))
            .bind(i16::from(partition))
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn raise(
        conn: &mut PgConnection,
        names: &Names,
        resource: &Resource,
        token: Token,
    ) -> sqlx::Result<Option<Dead>> {
        const RAISE: &str =
            "SELECT a.outcome, a.max_token, a.by_floor FROM tower_fence.try_raise($1, $2) AS a";
        let answer: (String, i64, bool) = sqlx::query_as(names.sql(RAISE))
            .bind(resource.as_str())
            .bind(token.get())
            .fetch_one(conn)
            .await?;
        let (outcome, max_token, by_floor) = answer;
        let dead = Dead {
            max_token,
            by_floor,
            announced: false,
        };
        Ok((outcome != "behind").then_some(dead))
    }

    async fn max_token(
        conn: &mut PgConnection,
        names: &Names,
        resource: &Resource,
    ) -> sqlx::Result<Option<i64>> {
        sqlx::query_scalar(names.sql("SELECT tower_fence.max_token($1)"))
            .bind(resource.as_str())
            .fetch_one(conn)
            .await
    }

    async fn remove_idle(
        conn: &mut PgConnection,
        names: &Names,
        partition: u8,
        idle: Idle,
    ) -> sqlx::Result<u64> {
        if names.is_distributed() {
            let refused = "a distributed fence cannot remove the rows of idle resources";
            return Err(sqlx::Error::Configuration(refused.into()));
        }
        const REMOVE: &str =
            "SELECT tower_fence.remove_idle_of($1, $2 * interval '1 s', $3, $4, $5)";
        let removed: i32 = sqlx::query_scalar(names.sql(REMOVE))
            .bind(i16::from(partition))
            .bind(idle.older_than.as_secs_f64())
            .bind(i32::try_from(idle.at_most).unwrap_or(i32::MAX))
            .bind(idle.granted.map(Token::get))
            .bind(idle.live.map(Token::get))
            .fetch_one(conn)
            .await?;
        Ok(removed.unsigned_abs().into())
    }

    const AT_ONCE: bool = true;

    async fn write_at_once(
        conn: &mut PgConnection,
        names: &Names,
        admit: Admit<'_>,
        lock_timeout: Duration,
        statement: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<PgRow>> {
        at_once::write(conn, names, admit, lock_timeout, statement).await
    }

    async fn write_admitted(
        conn: &mut PgConnection,
        statement: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<PgRow>> {
        at_once::write_admitted(conn, statement).await
    }

    async fn announce(
        conn: &mut PgConnection,
        names: &Names,
        resource: &Resource,
        token: Token,
        lease: &LeaseDigest,
    ) -> sqlx::Result<Announcement> {
        const ANNOUNCE: &str =
            "SELECT a.outcome, a.highest, a.was_last FROM tower_fence.announce($1, $2, $3) AS a";
        let answer: (String, Option<i64>, bool) = sqlx::query_as(names.sql(ANNOUNCE))
            .bind(resource.as_str())
            .bind(token.get())
            .bind(&lease.as_bytes()[..])
            .fetch_one(conn)
            .await?;
        Ok(match answer {
            (outcome, ..) if outcome == "announced" => Announcement::Announced,
            (outcome, Some(highest), was_last) if outcome == "outranked" => {
                Announcement::Outranked { highest, was_last }
            }
            _ => Announcement::Behind,
        })
    }

    async fn reset(
        conn: &mut PgConnection,
        names: &Names,
        resource: &Resource,
        token: Token,
    ) -> sqlx::Result<i64> {
        sqlx::query_scalar(names.sql("SELECT tower_fence.reset($1, $2)"))
            .bind(resource.as_str())
            .bind(token.get())
            .fetch_one(conn)
            .await
    }

    async fn next_epoch(
        conn: &mut PgConnection,
        names: &Names,
        partition: u8,
        at_least: i64,
    ) -> sqlx::Result<i64> {
        sqlx::query_scalar(names.sql("SELECT tower_fence.next_epoch($1, $2)"))
            .bind(i16::from(partition))
            .bind(at_least)
            .fetch_one(conn)
            .await
    }

    async fn report_epoch(
        conn: &mut PgConnection,
        names: &Names,
        partition: u8,
        seen: i64,
    ) -> sqlx::Result<i64> {
        sqlx::query_scalar(names.sql("SELECT tower_fence.report_epoch($1, $2)"))
            .bind(i16::from(partition))
            .bind(seen)
            .fetch_one(conn)
            .await
    }
}

impl States for Postgres {
    states!(idle_ms: "CAST(extract(epoch FROM clock_timestamp() - updated_at) * 1000 AS bigint)");
}
