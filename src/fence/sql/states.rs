//! Statements that read the state of the fence for operators.

/// Row of a resource: its name, `max_token`, the highest announced token, and the milliseconds
/// since the last use.
pub(crate) type StateRow = (String, i64, i64, i64);

/// Implements the methods of [`Tables`](super::Tables) that read the state of the fence. This is a
/// macro because sqlx has different types for each database. `idle_ms` is the SQL expression for
/// the milliseconds since `updated_at`.
macro_rules! states {
    (idle_ms: $idle_ms:literal) => {
        async fn state(
            On { conn, names }: On<'_, Self>,
            resource: &Resource,
        ) -> sqlx::Result<Option<StateRow>> {
            const STATE: &str = concat!(
                "SELECT resource, max_token, announced, ",
                $idle_ms,
                " FROM tower_fence.resources WHERE resource = $1"
            );
            sqlx::query_as(names.sql(STATE))
                .bind(resource.as_str())
                .fetch_optional(conn)
                .await
        }

        async fn states(
            On { conn, names }: On<'_, Self>,
            [first, last]: [&str; 2],
            after: &str,
            limit: u32,
        ) -> sqlx::Result<Vec<StateRow>> {
            // All conditions are on the primary key, so the cost of a page depends only on its
            // number of rows.
            const STATES: &str = concat!(
                "SELECT resource, max_token, announced, ",
                $idle_ms,
                " FROM tower_fence.resources \
                 WHERE resource > $1 AND resource >= $2 AND resource <= $3 ORDER BY resource LIMIT $4"
            );
            let sql = match names.is_distributed() {
                // On a distributed fence, the collation of the column may differ from "C".
                true => {
                    let bytewise = STATES.replace("resource ", "resource COLLATE \"C\" ");
                    sqlx::AssertSqlSafe(names.apply(&bytewise)).into_sql_str()
                }
                false => names.sql(STATES),
            };
            sqlx::query_as(sql)
                .bind(after)
                .bind(first)
                .bind(last)
                .bind(i64::from(limit))
                .fetch_all(conn)
                .await
        }

        async fn floor(
            On { conn, names }: On<'_, Self>,
            partition: u8,
        ) -> sqlx::Result<i64> {
            const FLOOR: &str = "SELECT floor FROM tower_fence.floors WHERE partition = $1";
            let floor = sqlx::query_scalar(names.sql(FLOOR))
                .bind(i16::from(partition))
                .fetch_optional(conn);
            // The migrations insert a row for each partition.
            floor.await?.ok_or_else(|| {
                let missing = format!(
                    "floors has no row for partition {partition}: row-level security hides it, or the \
                     tables of the fence were emptied, or restored in part"
                );
                sqlx::Error::Configuration(missing.into())
            })
        }

        async fn last_epoch(
            On { conn, names }: On<'_, Self>,
            partition: u8,
        ) -> sqlx::Result<Option<i64>> {
            const LAST: &str = "SELECT epoch FROM tower_fence.epochs WHERE partition = $1";
            sqlx::query_scalar(names.sql(LAST))
                .bind(i16::from(partition))
                .fetch_optional(conn)
                .await
        }

        async fn source_id(On { conn, names }: On<'_, Self>,) -> sqlx::Result<String> {
            sqlx::query_scalar(names.sql("SELECT id FROM tower_fence.epoch_source"))
                .fetch_one(conn)
                .await
        }

        async fn floors(
            On { conn, names }: On<'_, Self>,
        ) -> sqlx::Result<Vec<(i16, i64)>> {
            const FLOORS: &str = "SELECT partition, floor FROM tower_fence.floors \
                 WHERE floor > 0 ORDER BY partition";
            sqlx::query_as(names.sql(FLOORS)).fetch_all(conn).await
        }
    };
}

pub(super) use states;
