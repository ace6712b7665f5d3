//! Implementation of the fence in Postgres.
//!
//! The SQL functions in `migrations/postgres` implement the rules of the fence. To admit the token
//! of a resource that has a row, the fence sends one prepared `UPDATE`. If the `UPDATE` admits no
//! token, and for every other operation, the fence calls a function.

mod admit;
mod at_once;
mod check;
mod functions;
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
        functions::catch_up(conn, names, resource).await
    }

    async fn after_failover(
        conn: &mut PgConnection,
        names: &Names,
        partition: u8,
    ) -> sqlx::Result<()> {
        functions::after_failover(conn, names, partition).await
    }

    async fn raise(
        conn: &mut PgConnection,
        names: &Names,
        resource: &Resource,
        token: Token,
    ) -> sqlx::Result<Option<Dead>> {
        functions::raise(conn, names, resource, token).await
    }

    async fn max_token(
        conn: &mut PgConnection,
        names: &Names,
        resource: &Resource,
    ) -> sqlx::Result<Option<i64>> {
        functions::max_token(conn, names, resource).await
    }

    async fn remove_idle(
        conn: &mut PgConnection,
        names: &Names,
        partition: u8,
        idle: Idle,
    ) -> sqlx::Result<u64> {
        functions::remove_idle(conn, names, partition, idle).await
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
        functions::announce(conn, names, resource, token, lease).await
    }

    async fn reset(
        conn: &mut PgConnection,
        names: &Names,
        resource: &Resource,
        token: Token,
    ) -> sqlx::Result<i64> {
        functions::reset(conn, names, resource, token).await
    }

    async fn next_epoch(
        conn: &mut PgConnection,
        names: &Names,
        partition: u8,
        at_least: i64,
    ) -> sqlx::Result<i64> {
        functions::next_epoch(conn, names, partition, at_least).await
    }

    async fn report_epoch(
        conn: &mut PgConnection,
        names: &Names,
        partition: u8,
        seen: i64,
    ) -> sqlx::Result<i64> {
        functions::report_epoch(conn, names, partition, seen).await
    }
}

impl States for Postgres {
    states!(idle_ms: "CAST(extract(epoch FROM clock_timestamp() - updated_at) * 1000 AS bigint)");
}
