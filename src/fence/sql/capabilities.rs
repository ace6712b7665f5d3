//! What a database does that speaks the protocol of Postgres, beyond plain SQL.
//!
//! 1. A fence asks once, together with where its tables are. No request pays for it.
//! 2. Only what is not there at all is done without. What is there and fails, fails.
//! 3. The statements are written for Postgres. A function that is missing is replaced in their texts by what
//!    it would have said.

use std::fmt;

/// What is there. SQLite has none of it, and statements of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// `xmin` tells each version of a row from the next. Without it check and write are never one statement, and
    /// a fenced read that has to raise the fence reads twice.
    pub(in crate::fence) row_versions: bool,
    /// Advisory locks, which end with their transaction.
    pub(in crate::fence) advisory_locks: bool,
    /// A session that has such a lock can be found and ended. Otherwise its connection is closed.
    pub(in crate::fence) ends_sessions: bool,
    /// Transactions have numbers, which protected tables need.
    pub(in crate::fence) transaction_ids: bool,
    /// `fence_history` says whether the database has failed over.
    pub(in crate::fence) history: bool,
}

impl Capabilities {
    /// Those of Postgres itself.
    pub(in crate::fence) const ALL: Self = Self {
        row_versions: true,
        advisory_locks: true,
        ends_sessions: true,
        transaction_ids: true,
        history: true,
    };

    /// Whether a statement can run together with its admission.
    pub(in crate::fence) const fn write_at_once(self) -> bool {
        self.row_versions && self.advisory_locks && self.transaction_ids && self.history
    }

    /// A statement without the functions that are missing.
    pub(super) fn adapt(self, statement: &str) -> String {
        let mut statement = statement.to_owned();
        for (is_there, of_postgres, without) in [
            (
                self.row_versions,
                "SELECT max_token, xmin::text,",
                "SELECT max_token, NULL::text,",
            ),
            (
                self.advisory_locks,
                "pg_catalog.pg_try_advisory_xact_lock_shared(",
                "(",
            ),
            (
                self.transaction_ids,
                "pg_catalog.pg_current_xact_id()",
                "NULL",
            ),
            // As where a server does not tell.
            (self.history, "{schema}.fence_history()", "''"),
        ] {
            if !is_there {
                statement = statement.replace(of_postgres, without);
            }
        }
        statement
    }
}

/// What is missing, and what is done instead.
impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let missing = [
            (
                self.row_versions,
                "no xmin: writes at once take a transaction, fenced reads may read twice",
            ),
            (
                self.advisory_locks && self.ends_sessions,
                "no end of a session by its advisory lock: an abandoned connection is closed",
            ),
            (
                self.transaction_ids,
                "no pg_current_xact_id: no table can be protected",
            ),
            (self.history, "no fence_history: no failover is noticed"),
        ];
        let missing = missing.iter().filter(|(is_there, _)| !is_there);
        for (place, (_, what)) in missing.enumerate() {
            f.write_str(if place > 0 { "; " } else { "" })?;
            f.write_str(what)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATEMENT: &str = "UPDATE t SET by = pg_catalog.pg_current_xact_id() \
        WHERE history = {schema}.fence_history() AND pg_catalog.pg_try_advisory_xact_lock_shared($4) IS NOT NULL";

    #[test]
    fn what_is_there_is_used_and_what_is_not_is_replaced() {
        assert_eq!(Capabilities::ALL.adapt(STATEMENT), STATEMENT);
        assert_eq!(Capabilities::ALL.to_string(), "");
        let none = Capabilities {
            row_versions: false,
            advisory_locks: false,
            ends_sessions: false,
            transaction_ids: false,
            history: false,
        };
        assert_eq!(
            none.adapt(STATEMENT),
            "UPDATE t SET by = NULL WHERE history = '' AND ($4) IS NOT NULL"
        );
        assert_eq!(none.to_string().split("; ").count(), 4);
        assert!(Capabilities::ALL.write_at_once() && !none.write_at_once());
    }

    #[test]
    fn a_statement_runs_with_its_admission_only_where_all_is_there_that_it_needs() {
        let all = Capabilities::ALL;
        let without: [fn(&mut Capabilities); 4] = [
            |some| some.row_versions = false,
            |some| some.advisory_locks = false,
            |some| some.transaction_ids = false,
            |some| some.history = false,
        ];
        for take in without {
            let mut some = all;
            take(&mut some);
            assert!(!some.write_at_once());
        }
        let ends_none = Capabilities {
            ends_sessions: false,
            ..all
        };
        assert!(ends_none.write_at_once());
    }
}
