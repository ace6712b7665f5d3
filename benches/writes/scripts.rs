//! The statements of the handlers, for pgbench.

use super::DATABASE;
use crate::support::{pgbench::Pgbench, postgres::PostgresServer};

/// Name and text of each script, and whether it can be measured on one hot resource.
pub const SCRIPTS: [(&str, &str, bool); 3] = [
    (
        "pgbench, update",
        "UPDATE stock SET n = n - 1 WHERE sku = :sku;",
        true,
    ),
    (
        "pgbench, transaction",
        "BEGIN;\nUPDATE stock SET n = n - 1 WHERE sku = :sku;\nCOMMIT;",
        true,
    ),
    // On one resource, the statement would need retries like those of the fence.
    (
        ONE_STATEMENT,
        "WITH fence AS (\
            UPDATE tower_fence.resources AS f \
            SET max_token = :token::bigint, updated_at = CURRENT_TIMESTAMP, \
                admitted_by = pg_current_xact_id() \
            WHERE f.resource = :sku AND f.max_token < :token::bigint \
                AND f.history = tower_fence.current_history() \
                AND (f.announced >= :token::bigint OR f.announced_lease IS NULL) AND f.xmin = (\
                SELECT s.xmin FROM tower_fence.resources AS s \
                WHERE s.resource = :sku AND set_config('lock_timeout', '5000ms', true) IS NOT NULL) \
            RETURNING 1\
        ), work AS (\
            UPDATE stock SET n = n - 1 WHERE sku = :sku AND EXISTS (SELECT 1 FROM fence) RETURNING n\
        ) SELECT work.* FROM (SELECT 1) AS always LEFT JOIN work ON true \
        WHERE CASE WHEN EXISTS (SELECT 1 FROM work) AND EXISTS (SELECT 1 FROM fence) THEN true \
            ELSE ('nothing, in ' || pg_backend_pid())::boolean END;",
        false,
    ),
];

/// The statement of `Fence::write`.
pub const ONE_STATEMENT: &str = "pgbench, one statement";

/// Creates a script from statements that contain `:sku`. The statements are those of the handlers.
///
/// Each client has its own resources, whose names begin with `prefix`.
pub fn pgbench<'a>(
    server: &'a PostgresServer,
    statements: &str,
    prefix: &str,
    resources: usize,
    clients: usize,
) -> Pgbench<'a> {
    let choice = match resources / clients {
        0 => "\\set n 0".to_owned(),
        of_each => {
            format!(
                "\\set n random(0, {}) * {clients} + :client_id",
                of_each - 1
            )
        }
    };
    let sku = format!("('{prefix}-' || :n::text)");
    let statements = statements.replace(":sku", &sku);
    Pgbench::new(server, DATABASE, clients, &choice, &statements)
}
