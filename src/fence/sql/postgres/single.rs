//! Single-statement writes that also admit the token.

use sqlx::{AssertSqlSafe, Connection, PgConnection, Postgres, postgres::PgRow};

use crate::fence::{
    fault::is_unprepared,
    settings::millis,
    sql::{Admit, Arguments, On, SingleStatements, Statement},
};

/// Message of the error with which the statement of [`single`] fails in order to be rolled back.
const NOTHING: &str =
    "tower-fence: the single statement was rolled back and runs again in a transaction";

impl SingleStatements for Postgres {
    async fn write_single(
        On { conn, names }: On<'_, Self>,
        admit: Admit<'_>,
        statement: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<PgRow>> {
        let mut arguments = statement.arguments.clone();
        let sql = single(names.prefix(), trimmed(statement), arguments.len());
        let bound = arguments
            .add(admit.claim.resource.as_str())
            .and_then(|()| arguments.add(admit.claim.token.get()))
            .and_then(|()| arguments.add(admit.raised_to()))
            .and_then(|()| arguments.add(millis(admit.limits.lock_timeout)));
        bound.map_err(sqlx::Error::Encode)?;
        let query = sqlx::query_with(AssertSqlSafe(sql), arguments);
        // Read the responses to the end, because the response to the COMMIT follows the last row.
        match query.fetch_all(&mut *conn).await {
            Err(error) if is_unprepared(&error) => {
                conn.clear_cached_statements().await?;
                Ok(Vec::new())
            }
            Err(sqlx::Error::Database(error))
                if error.message().contains(NOTHING)
                    // A deadlock has one of these codes. So does a concurrent write to the row, if
                    // the isolation level of the pool's sessions is stricter than READ COMMITTED.
                    || matches!(error.code().as_deref(), Some("40001" | "40P01")) =>
            {
                Ok(Vec::new())
            }
            // The response belongs to an earlier statement, so the outcome is unknown.
            Ok(rows) if rows.is_empty() => Err(sqlx::Error::Protocol(
                "the single statement returned neither a row nor an error".into(),
            )),
            outcome => outcome,
        }
    }

    async fn write_admitted(
        conn: &mut PgConnection,
        statement: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<PgRow>> {
        let sql = format!(
            "WITH fence AS (SELECT 1), work AS ({}\n) SELECT * FROM work",
            trimmed(statement)
        );
        sqlx::query_with(AssertSqlSafe(sql), statement.arguments.clone())
            .fetch_all(conn)
            .await
    }
}

/// Returns a statement that admits the token and runs the application's statement. The resource,
/// the token, the new `max_token` and the lock timeout are bound after the arguments of the
/// application's statement. The result either writes under an admitted token and returns the
/// written rows, or has no effect.
///
/// The subquery reads the `xmin` of the row's version in the snapshot, while `f.xmin` is that of
/// the newest version. If they differ, another write was committed after the snapshot was taken,
/// and the statement would not see that write. `max_token` cannot replace `xmin` here, because a
/// second reusable write under a token does not change `max_token`. If `fence` or `work` has no
/// row, a cast makes the statement fail. The failure keeps the token usable, and also rolls back
/// the effects of triggers.
fn single(prefix: &str, statement: &str, bound: usize) -> String {
    let [resource, token, raised_to, wait] = [1, 2, 3, 4].map(|place| bound + place);
    format!(
        "WITH fence AS (\
            UPDATE {prefix}resources AS f \
            SET max_token = ${raised_to}, updated_at = CURRENT_TIMESTAMP, \
                admitted_by = pg_catalog.pg_current_xact_id() \
            WHERE f.resource = ${resource} AND f.max_token < ${token} \
                AND f.history = {prefix}current_history() \
                AND (f.announced >= ${token} OR f.announced_lease IS NULL) \
                AND f.xmin = (\
                SELECT s.xmin FROM {prefix}resources AS s \
                WHERE s.resource = ${resource} \
                    AND pg_catalog.set_config('lock_timeout', ${wait}, true) IS NOT NULL) \
            RETURNING 1\
        ), work AS ({statement}\n) SELECT work.* FROM (SELECT 1) AS always LEFT JOIN work ON true \
        WHERE CASE WHEN EXISTS (SELECT 1 FROM work) AND EXISTS (SELECT 1 FROM fence) THEN true \
            ELSE ('{NOTHING}, in ' || pg_backend_pid())::boolean END"
    )
}

/// Returns the statement in a form that can be put into parentheses. The callers append a line
/// break, in case the statement ends with a comment.
fn trimmed(statement: &Statement<Postgres>) -> &str {
    let sql = statement.sql.as_str();
    sql.trim_end_matches(|end: char| end == ';' || end.is_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_ends_before_its_semicolons_and_blanks() {
        for sql in ["SELECT 'fence'", "SELECT 'fence';", "SELECT 'fence' ;\n ; "] {
            let statement = Statement::new(sqlx::query(AssertSqlSafe(sql)))
                .ok()
                .unwrap();
            assert_eq!(trimmed(&statement), "SELECT 'fence'");
        }
    }
}
