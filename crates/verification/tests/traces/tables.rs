//! The names of the fence's tables.

use crate::support::database::TestDatabase;

/// Adapts a statement for Postgres to this database. SQLite has no schemas, so the names of its
/// tables begin with `tower_fence_`.
pub fn sql<DB: TestDatabase>(statement: &str) -> String {
    match DB::ABORTS_ON_ERROR {
        true => statement.to_owned(),
        false => statement.replace("tower_fence.", "tower_fence_"),
    }
}
