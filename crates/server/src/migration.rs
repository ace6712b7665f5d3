//! Creates and updates the tables of the fence, and finds the fences of a database.

use std::{pin::pin, time::Duration};

use sqlx::{AssertSqlSafe, Connection, PgConnection, Postgres, Row, migrate::MigrateError};
use tokio::time::{sleep, timeout};
use tower_fence::{AdmitError, Fence};

use crate::{
    database::may_pass,
    failure::{Failure, UNAVAILABLE, shown},
};

/// The interval at which the log reports that a migration is still waiting.
const LONG: Duration = Duration::from_secs(2);
/// After this number of consecutive reports for which the database did not answer, the migration
/// fails.
const UNANSWERED: u32 = 10;

/// Creates or updates the tables, and returns whether this was necessary. While another transaction
/// blocks the migration, the log reports that transaction.
pub async fn migrate(fence: &Fence<Postgres>, place: &str) -> Result<bool, Failure> {
    let is_needed = matches!(
        fence.check().await,
        Err(AdmitError::NotMigrated(_) | AdmitError::Misconfigured(_))
    );
    let mut migrating = pin!(fence.migrate());
    let mut unanswered = 0;
    loop {
        tokio::select! {
            migrated = &mut migrating => {
                return migrated.map(|()| is_needed).map_err(|error| {
                    let failed = Failure::unavailable(&format!("cannot migrate {place}"), &error);
                    match error {
                        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _)
                            if may_pass(&error) => failed,
                        _ => Failure::configuration(failed.text),
                    }
                });
            }
            () = sleep(LONG) => {
                let found = match timeout(LONG, blockers(fence)).await {
                    Ok(Ok(found)) => Some(found),
                    Ok(Err(sqlx::Error::Database(_))) => Some(None),
                    Ok(Err(_)) | Err(_) => None,
                };
                unanswered = if found.is_some() { 0 } else { unanswered + 1 };
                if unanswered == UNANSWERED {
                    let text = format!("cannot migrate {place}: the database does not answer");
                    return Err(Failure::new(UNAVAILABLE, text));
                }
                let waits_for = found.flatten();
                let waits_for = waits_for.as_deref().unwrap_or("the database");
                tracing::warn!(%place, waits_for, "still migrating");
            }
        }
    }
}

/// Describes the sessions that block sessions of this program; `None` if there are none.
async fn blockers(fence: &Fence<Postgres>) -> sqlx::Result<Option<String>> {
    let options = fence.pool().connect_options();
    let mut conn = PgConnection::connect_with(&options).await?;
    let found = sqlx::query_scalar(BLOCKERS).fetch_one(&mut conn).await?;
    conn.close().await?;
    Ok(found)
}

const BLOCKERS: &str = "\
    SELECT pg_catalog.string_agg(DISTINCT CASE in_the_way.pid WHEN 0 THEN 'the lock of a prepared transaction (pg_prepared_xacts)' \
        ELSE pg_catalog.format('the lock of process %s (%s, %s, in a transaction for %s s)', in_the_way.pid, \
        coalesce(nullif(b.application_name, ''), 'unnamed'), coalesce(b.state, 'state unknown'), \
        coalesce(pg_catalog.round(extract(epoch FROM pg_catalog.clock_timestamp() - b.xact_start))::text, '?')) END, '; ') \
    FROM pg_catalog.pg_stat_activity AS a \
    CROSS JOIN LATERAL pg_catalog.unnest(pg_catalog.pg_blocking_pids(a.pid)) AS in_the_way (pid) \
    LEFT JOIN pg_catalog.pg_stat_activity AS b ON b.pid = in_the_way.pid \
    WHERE a.wait_event_type = 'Lock' AND a.datname = pg_catalog.current_database() AND a.usename = current_user \
        AND a.application_name = pg_catalog.current_setting('application_name')";

/// Reads the owner of the fence's schema (NULL if the schema does not exist), whether the fence
/// detects failovers, and the schemas of other fences, in one statement that needs no privileges.
const FENCES: &str = "\
    SELECT pg_catalog.pg_get_userbyid(n.nspowner)::text AS owner, \
        EXISTS (SELECT FROM pg_catalog.pg_proc AS p \
            WHERE p.pronamespace = n.oid AND p.proname = 'current_history' \
                AND p.prosrc NOT LIKE '%pg_walfile_name%') AS misses_failovers, \
        (SELECT pg_catalog.string_agg(f.nspname, ', ' ORDER BY f.nspname) FROM (SELECT o.nspname \
            FROM pg_catalog.pg_namespace AS o JOIN pg_catalog.pg_class AS c ON c.relnamespace = o.oid \
            WHERE o.nspname <> '{schema}' AND c.relname = 'epoch_source' AND EXISTS (SELECT FROM pg_catalog.pg_proc AS p \
                WHERE p.pronamespace = o.oid AND p.proname = 'try_admit') \
            ORDER BY o.nspname LIMIT 10) AS f) AS others \
    FROM (SELECT) AS one LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = '{schema}'";

/// The properties of the schema of the fence, and the schemas of other fences.
pub struct Fences {
    pub owner: Option<String>,
    pub misses_failovers: bool,
    pub others: Option<String>,
}

pub async fn fences(conn: &mut PgConnection, schema: &str) -> sqlx::Result<Fences> {
    let sql = AssertSqlSafe(FENCES.replace("{schema}", schema));
    let row = sqlx::raw_sql(sql).fetch_one(conn).await?;
    let (owner, others): (Option<String>, Option<String>) =
        (row.try_get("owner")?, row.try_get("others")?);
    Ok(Fences {
        owner: owner.as_deref().map(shown),
        misses_failovers: row.try_get("misses_failovers")?,
        others: others.as_deref().map(shown),
    })
}

/// Returns the schemas of other fences in the database of this fence, at most ten.
pub async fn other_fences(fence: &Fence<Postgres>, schema: &str) -> sqlx::Result<Option<String>> {
    let reading = async {
        let mut conn = fence.pool().acquire().await?;
        fences(&mut conn, schema).await
    };
    let read = timeout(LONG, reading).await;
    Ok(read.map_err(|_| sqlx::Error::PoolTimedOut)??.others)
}
