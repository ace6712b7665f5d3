//! Names of the fence's tables and functions in a database.
//!
//! Every statement qualifies these names with their schema. It therefore uses the fence's own
//! tables and functions, even if the application changes `search_path` in its transactions or on a
//! connection, or has a temporary table with the same name.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

/// Prefix of the names in the source text of statements and migrations.
const WRITTEN: &str = "tower_fence.";

/// Names in one database.
pub(crate) struct Names {
    /// The prefix `tower_fence.`, or its replacement.
    prefix: Box<str>,
    /// Whether the rows of the fence are on the workers of a Citus cluster. The value is valid
    /// after the fence has been checked.
    is_distributed: AtomicBool,
    /// Whether the server is the coordinator of a Citus cluster. The value is valid after the fence
    /// has been checked.
    has_workers: AtomicBool,
}

impl Names {
    pub(in crate::fence) fn new(prefix: impl Into<Box<str>>) -> Self {
        Self {
            prefix: prefix.into(),
            is_distributed: AtomicBool::new(false),
            has_workers: AtomicBool::new(false),
        }
    }

    /// Returns the text of a statement with the prefix of this database in place of `tower_fence.`.
    pub(in crate::fence) fn sql(&self, written: &'static str) -> SqlStr {
        if &*self.prefix == WRITTEN {
            return written.into_sql_str();
        }
        AssertSqlSafe(self.apply(written)).into_sql_str()
    }

    /// Replaces the prefix `tower_fence.` in a string with the prefix of this database.
    pub(in crate::fence) fn apply(&self, written: &str) -> String {
        written.replace(WRITTEN, &self.prefix)
    }

    pub(in crate::fence) fn is_distributed(&self) -> bool {
        self.is_distributed.load(Relaxed)
    }

    pub(in crate::fence) fn has_workers(&self) -> bool {
        self.has_workers.load(Relaxed)
    }

    /// Records that the server is the coordinator of a Citus cluster.
    #[cfg(feature = "postgres")]
    pub(in crate::fence) fn set_coordinator(&self, is_distributed: bool) {
        self.has_workers.store(true, Relaxed);
        self.is_distributed.store(is_distributed, Relaxed);
    }

    pub(in crate::fence) fn prefix(&self) -> &str {
        &self.prefix
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_gets_the_prefix_of_its_database() {
        const WRITTEN: &str = "SELECT 1 FROM tower_fence.floors, tower_fence.epochs";
        let names = Names::new("shop.");
        let text = names.sql(WRITTEN);
        assert_eq!(text.as_str(), "SELECT 1 FROM shop.floors, shop.epochs");
        assert_eq!(Names::new("tower_fence.").sql(WRITTEN).as_str(), WRITTEN);
    }
}
