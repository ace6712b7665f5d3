//! The statements that show operators what the fence has.

use sqlx::Database;

use super::Tables;
use crate::token::Resource;

/// A row: the resource, `max_token`, the highest token that was announced, and for how many milliseconds nobody
/// has used it.
pub(crate) type StateRow = (String, i64, i64, i64);

/// The rows of a page.
pub(crate) struct Rows<'a> {
    /// Not before the names that begin with this, and not after them.
    pub(in crate::fence) first: &'a str,
    pub(in crate::fence) last: &'a str,
    /// Behind this name.
    pub(in crate::fence) after: &'a str,
    pub(in crate::fence) limit: u32,
}

/// The statements.
pub(crate) trait States: Database {
    /// Reads the row of a resource, if it has one.
    fn state(
        conn: &mut Self::Connection,
        tables: &Tables,
        resource: &Resource,
    ) -> impl Future<Output = sqlx::Result<Option<StateRow>>> + Send;

    /// Reads rows in the order of their names, byte by byte.
    fn states(
        conn: &mut Self::Connection,
        tables: &Tables,
        rows: Rows<'_>,
    ) -> impl Future<Output = sqlx::Result<Vec<StateRow>>> + Send;

    /// Reads the floors that are not 0.
    fn floors(
        conn: &mut Self::Connection,
        tables: &Tables,
    ) -> impl Future<Output = sqlx::Result<Vec<(i16, i64)>>> + Send;
}

/// The macro writes the statements once per database, since sqlx's types differ. `idle_ms` is the time since
/// `updated_at`.
macro_rules! states {
    (idle_ms: $idle_ms:literal) => {
        async fn state(
            conn: &mut Self::Connection,
            tables: &Tables,
            resource: &Resource,
        ) -> sqlx::Result<Option<StateRow>> {
            const STATE: &str = concat!(
                "SELECT resource, max_token, announced, ",
                $idle_ms,
                " FROM {schema}.fence_resources WHERE resource = $1"
            );
            sqlx::query_as(tables.sql(STATE))
                .bind(resource.as_str())
                .fetch_optional(conn)
                .await
        }

        async fn states(
            conn: &mut Self::Connection,
            tables: &Tables,
            rows: Rows<'_>,
        ) -> sqlx::Result<Vec<StateRow>> {
            // Both bounds are of the primary key, so a page costs as much as it has rows.
            const STATES: &str = concat!(
                "SELECT resource, max_token, announced, ",
                $idle_ms,
                " FROM {schema}.fence_resources \
                 WHERE resource > $1 AND resource >= $2 AND resource <= $3 ORDER BY resource LIMIT $4"
            );
            sqlx::query_as(tables.sql(STATES))
                .bind(rows.after)
                .bind(rows.first)
                .bind(rows.last)
                .bind(i64::from(rows.limit))
                .fetch_all(conn)
                .await
        }

        async fn floors(
            conn: &mut Self::Connection,
            tables: &Tables,
        ) -> sqlx::Result<Vec<(i16, i64)>> {
            const FLOORS: &str = "SELECT partition, floor FROM {schema}.fence_floors \
                 WHERE floor > 0 ORDER BY partition";
            sqlx::query_as(tables.sql(FLOORS)).fetch_all(conn).await
        }
    };
}

pub(super) use states;
