//! Statements for pgbench that write to resources with and without a row.

use super::{
    CONNECTIONS,
    support::{pgbench::Pgbench, postgres::PostgresServer},
    table::Table,
};

/// Statements of an admission: one statement for an existing row, and one for a missing row.
#[derive(Clone, Copy)]
pub struct Admission {
    known: &'static str,
    first: &'static str,
}

/// The same statements for a table without floors.
pub const WITHOUT_FLOOR: Admission = Admission {
    known: "UPDATE tower_fence.resources SET max_token = :token::bigint, updated_at = CURRENT_TIMESTAMP \
         WHERE resource = :name AND max_token < :token::bigint;",
    first: "INSERT INTO tower_fence.resources AS r (resource, max_token, updated_at) \
         SELECT :name, :token::bigint, CURRENT_TIMESTAMP \
         ON CONFLICT (resource) DO UPDATE \
         SET max_token = excluded.max_token, updated_at = excluded.updated_at \
         WHERE r.max_token < :token::bigint;",
};

/// Admission statements of `tower_fence.try_admit`.
///
/// The crate sends the first statement directly.
pub const WITH_FLOOR: Admission = Admission {
    known: "UPDATE tower_fence.resources SET max_token = :token::bigint, updated_at = CURRENT_TIMESTAMP, \
             admitted_by = pg_current_xact_id() \
         WHERE resource = :name AND max_token < :token::bigint \
             AND (announced >= :token::bigint OR announced_lease IS NULL) \
             AND history = tower_fence.current_history();",
    first: "INSERT INTO tower_fence.resources AS r \
             (resource, max_token, updated_at, partition, admitted_by, history) \
         SELECT :name, :token::bigint, CURRENT_TIMESTAMP, s.partition, pg_current_xact_id(), s.history \
         FROM (\
             SELECT partition, floor, history FROM tower_fence.floors \
             WHERE partition = :partition::smallint AND history = tower_fence.current_history() FOR SHARE\
         ) AS s \
         WHERE :token::bigint > s.floor \
         ON CONFLICT (resource) DO UPDATE \
         SET max_token = excluded.max_token, updated_at = excluded.updated_at, \
             admitted_by = excluded.admitted_by \
         WHERE r.max_token < :token::bigint AND r.history = excluded.history;",
};

/// The function call of programs in other languages.
pub const FUNCTION: Admission = Admission {
    known: "SELECT tower_fence.admit(:name, :token);",
    first: "",
};

/// Partitions of the new rows.
///
/// pgbench cannot compute the partition of a name, but the cost is the same for every partition.
#[derive(Clone, Copy)]
pub enum Partitions {
    All,
    One,
}

impl Admission {
    /// Returns writes to new resources.
    pub fn first_writes<'a>(
        &self,
        server: &'a PostgresServer,
        table: &Table,
        partitions: Partitions,
    ) -> Pgbench<'a> {
        let partition = match partitions {
            Partitions::All => "\\set partition random(0, 255)",
            Partitions::One => "\\set partition 7",
        };
        let name = "('new-' || :client_id::text || '-' || :token::text)";
        let statements = [self.known, self.first];
        Self::pgbench(server, table, partition, &statements, name)
    }

    /// Returns writes to `resource-0` to `resource-{rows - 1}`. Each client has its own resources.
    pub fn writes<'a>(
        &self,
        server: &'a PostgresServer,
        table: &Table,
        rows: usize,
    ) -> Pgbench<'a> {
        let of_each = rows / CONNECTIONS;
        let choice = format!(
            "\\set n random(0, {}) * {CONNECTIONS} + :client_id",
            of_each - 1
        );
        let name = "('resource-' || :n::text)";
        Self::pgbench(server, table, &choice, &[self.known], name)
    }

    fn pgbench<'a>(
        server: &'a PostgresServer,
        table: &Table,
        choice: &str,
        statements: &[&str],
        name: &str,
    ) -> Pgbench<'a> {
        let statements = statements.join("\n").replace(":name", name);
        let transaction = format!("BEGIN;\n{statements}\nCOMMIT;");
        Pgbench::new(server, &table.name, CONNECTIONS, choice, &transaction)
    }
}
