//! Admission of a token.

use sqlx::{AssertSqlSafe, Sqlite, SqliteConnection, sqlite::SqliteRow};

use crate::{
    epochs::partition_of,
    fence::sql::{
        Admission, Admissions, Admit, HighestStale, On, SingleStatements, Statement, Tables,
    },
    token::Resource,
};

impl Admissions for Sqlite {
    async fn admit(
        On { conn, names }: On<'_, Self>,
        admit: Admit<'_>,
        _early: bool,
    ) -> sqlx::Result<Admission> {
        // A token above the announced one also ends the announcement, as `try_admit` does in
        // Postgres.
        const ADMIT: &str = "UPDATE tower_fence.resources SET max_token = $3, updated_at = CURRENT_TIMESTAMP, \
                 announced_lease = CASE WHEN announced >= $2 THEN announced_lease END \
             WHERE resource = $1 AND max_token < $2";
        const FIRST: &str = "INSERT INTO tower_fence.resources AS r \
                 (resource, max_token, updated_at, partition) \
             SELECT $1, $3, CURRENT_TIMESTAMP, $4 FROM tower_fence.floors WHERE partition = $4 AND $2 > floor \
             ON CONFLICT (resource) DO NOTHING";
        let admitted = sqlx::query(names.sql(ADMIT))
            .bind(admit.claim.resource.as_str())
            .bind(admit.claim.token.get())
            .bind(admit.raised_to())
            .execute(&mut *conn);
        if admitted.await?.rows_affected() == 1 {
            return Ok(Admission::Admitted(None));
        }
        let first = sqlx::query(names.sql(FIRST))
            .bind(admit.claim.resource.as_str())
            .bind(admit.claim.token.get())
            .bind(admit.raised_to())
            .bind(i16::from(partition_of(&admit.claim.resource)))
            .execute(&mut *conn);
        if first.await?.rows_affected() == 1 {
            return Ok(Admission::Admitted(None));
        }
        Ok(Admission::Stale(
            highest_stale(On::new(conn, names), &admit.claim.resource).await?,
        ))
    }

    async fn admit_only(
        On { conn, names }: On<'_, Self>,
        admit: Admit<'_>,
    ) -> sqlx::Result<Admission> {
        Self::admit(On::new(conn, names), admit, false).await
    }
}

// In SQLite, a data-modifying statement cannot be part of another statement, so each write runs
// in an open transaction.
impl SingleStatements for Sqlite {
    async fn write_admitted(
        conn: &mut SqliteConnection,
        statement: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<SqliteRow>> {
        let sql = format!("WITH fence AS (SELECT 1) {}", statement.sql.as_str());
        sqlx::query_with(AssertSqlSafe(sql), statement.arguments.clone())
            .fetch_all(conn)
            .await
    }
}

pub(super) async fn highest_stale(
    On { conn, names }: On<'_, Sqlite>,
    resource: &Resource,
) -> sqlx::Result<HighestStale> {
    const MAX_TOKEN: &str = "SELECT max_token, announced > max_token \
             OR (announced = max_token AND announced > 0 AND announced_lease IS NULL) \
         FROM tower_fence.resources WHERE resource = $1";
    let row = sqlx::query_as(names.sql(MAX_TOKEN))
        .bind(resource.as_str())
        .fetch_optional(&mut *conn)
        .await?;
    Ok(match row {
        Some((max_token, announced)) => HighestStale {
            max_token,
            by_floor: false,
            announced,
        },
        None => HighestStale {
            max_token: Sqlite::floor(On::new(conn, names), partition_of(resource)).await?,
            by_floor: true,
            announced: false,
        },
    })
}
