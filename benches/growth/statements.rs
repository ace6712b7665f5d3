//! The statements of writes to resources with a row and without, for pgbench.

use super::{
    CONNECTIONS,
    support::{pgbench::Pgbench, postgres::PostgresServer},
    table::Table,
};

/// How an admission is sent: the statement for a row that is there, and the one for a row that is not.
#[derive(Clone, Copy)]
pub struct Admission {
    known: &'static str,
    first: &'static str,
}

/// What the crate sent before there were floors.
pub const WITHOUT_FLOOR: Admission = Admission {
    known: "UPDATE fence_resources SET max_token = :token::bigint, updated_at = CURRENT_TIMESTAMP \
         WHERE resource = :name AND max_token < :token::bigint \
             AND pg_try_advisory_xact_lock_shared(:token::bigint) IS NOT NULL;",
    first: "INSERT INTO fence_resources AS f (resource, max_token, updated_at) \
         SELECT :name, :token::bigint, CURRENT_TIMESTAMP \
         WHERE pg_try_advisory_xact_lock_shared(:token::bigint) IS NOT NULL \
         ON CONFLICT (resource) DO UPDATE \
         SET max_token = excluded.max_token, updated_at = excluded.updated_at \
         WHERE f.max_token < :token::bigint;",
};

/// What the crate sends.
pub const WITH_FLOOR: Admission = Admission {
    known: "UPDATE fence_resources SET max_token = :token::bigint, updated_at = CURRENT_TIMESTAMP, \
             admitted_by = pg_current_xact_id() \
         WHERE resource = :name AND max_token < :token::bigint \
             AND pg_try_advisory_xact_lock_shared(:token::bigint) IS NOT NULL;",
    first: "INSERT INTO fence_resources AS f (resource, max_token, updated_at, partition, admitted_by) \
         SELECT :name, :token::bigint, CURRENT_TIMESTAMP, :partition::smallint, pg_current_xact_id() \
         FROM (\
             SELECT floor FROM fence_floors WHERE partition = :partition::smallint FOR SHARE\
         ) AS s \
         WHERE :token::bigint > s.floor \
             AND pg_try_advisory_xact_lock_shared(:token::bigint) IS NOT NULL \
         ON CONFLICT (resource) DO UPDATE \
         SET max_token = excluded.max_token, updated_at = excluded.updated_at, \
             admitted_by = excluded.admitted_by \
         WHERE f.max_token < :token::bigint;",
};

/// As programs do that are not in Rust.
pub const FUNCTION: Admission = Admission {
    known: "SELECT fence_admit(:name, :token);",
    first: "",
};

/// In which partitions the new rows are. pgbench cannot compute that of a name; any other costs the same.
#[derive(Clone, Copy)]
pub enum Partitions {
    All,
    One,
}

impl Admission {
    /// Writes to resources that are new.
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

    /// Writes to `resource-0` to `resource-{rows - 1}`. Each client has its own.
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
