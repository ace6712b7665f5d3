//! Names of the fence's tables and functions in a database.
//!
//! Every statement qualifies these names with their schema. It therefore uses the fence's own
//! tables and functions, even if the application changes `search_path` in its transactions or on a
//! connection, or has a temporary table with the same name.

use std::sync::atomic::{
    AtomicBool, AtomicU8,
    Ordering::{Acquire, Relaxed, Release},
};

use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

/// Prefix of the names in the source text of statements and migrations.
const WRITTEN: &str = "tower_fence.";

/// Names in one database.
pub(crate) struct Names {
    /// The prefix `tower_fence.`, or its replacement.
    prefix: Box<str>,
    /// Whether the next use of the fence must check it.
    needs_check: AtomicBool,
    /// A [`Topology`].
    topology: AtomicU8,
}

/// Servers of a fence, as its check has found them. [`Names`] relies on the order of the variants.
#[derive(Clone, Copy)]
pub(in crate::fence) enum Topology {
    /// The server belongs to no Citus cluster, or the fence has not been checked yet.
    SingleServer,
    /// The server is the coordinator of a Citus cluster, and has the rows of the fence.
    Coordinator,
    /// The rows of the fence are on the workers of a Citus cluster.
    Distributed,
}

impl Names {
    pub(in crate::fence) fn new(prefix: impl Into<Box<str>>) -> Self {
        Self {
            prefix: prefix.into(),
            needs_check: AtomicBool::new(true),
            topology: AtomicU8::new(Topology::SingleServer as u8),
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

    pub(in crate::fence) fn is_checked(&self) -> bool {
        !self.needs_check.load(Acquire)
    }

    /// Returns whether the server is the coordinator of a Citus cluster.
    pub(in crate::fence) fn has_workers(&self) -> bool {
        self.is_at_least(Topology::Coordinator)
    }

    /// Returns whether the rows of the fence are on the workers of a Citus cluster.
    pub(in crate::fence) fn is_distributed(&self) -> bool {
        self.is_at_least(Topology::Distributed)
    }

    fn is_at_least(&self, topology: Topology) -> bool {
        self.topology.load(Relaxed) >= topology as u8
    }

    /// Records that the fence has passed its check.
    pub(in crate::fence) fn mark_checked(&self, topology: Topology) {
        self.set_topology(topology);
        // A task that reads this value also reads the topology.
        self.needs_check.store(false, Release);
    }

    /// Records a topology. A check that began earlier does not replace it, because a distributed
    /// fence stays distributed.
    pub(in crate::fence) fn set_topology(&self, topology: Topology) {
        self.topology.fetch_max(topology as u8, Relaxed);
    }

    /// Makes the next use of the fence check it again. Until then, transactions that are open use
    /// the topology that is known.
    pub(in crate::fence) fn require_check(&self) {
        self.needs_check.store(true, Release);
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
