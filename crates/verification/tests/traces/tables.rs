//! The names of the fence's tables.

use crate::support::database::TestDatabase;

/// A statement that names tables as Postgres does, for this database. SQLite has no schemas: there the name of a table
/// begins with `tower_fence_`.
pub fn sql<DB: TestDatabase>(statement: &str) -> String {
    match DB::ABORTS_ON_ERROR {
        true => statement.to_owned(),
        false => statement.replace("tower_fence.", "tower_fence_"),
    }
}
