//! What an error of the database means.
//!
//! Each error is judged once, here, and what was found goes with it from then on: nothing looks into
//! an error again.

use std::{
    io::{Error as IoError, ErrorKind},
    sync::Arc,
};

/// What happened to a statement that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "only Postgres says some")
)]
pub(crate) enum Fault {
    /// A lock, or a pool that is full: it had no effect, and another try may find the way free.
    Contention,
    /// A deadlock, or a serialization failure: another transaction went first, and this one is over. It had no
    /// effect, and another try may find the way free at once.
    Collision,
    /// The database does not run a data-modifying statement inside another one. It had no effect.
    Unsupported,
    /// A table, a column or a function is not there. It had no effect.
    Missing,
    /// A right is missing, row-level security is in the way, or a row that the migrations have made. It had no
    /// effect, and does not pass by itself.
    Misconfigured,
    /// The session is of no use: it is read-only, or its server is going away. It had no effect. Another
    /// session may be of use.
    Unusable,
    /// It writes to a protected table what its transaction has not admitted. It had no effect.
    Unfenced,
    /// It had no effect, for any other reason.
    Refused,
    /// The server has ended the session for a time limit, which it never does after a COMMIT. It had
    /// no effect.
    Ended,
    /// The connection is gone or confused; it may have had its effect.
    Lost,
    /// No answer came in time; it may have had its effect, or may yet have it.
    Silent,
}

impl Fault {
    /// What an error of sqlx says, on whichever database.
    pub(crate) fn of(error: &sqlx::Error) -> Self {
        match error {
            sqlx::Error::Database(cause) => {
                #[cfg(feature = "postgres")]
                if let Some(cause) = cause.try_downcast_ref() {
                    return Self::of_postgres(cause);
                }
                #[cfg(feature = "sqlite")]
                if let Some(cause) = cause.try_downcast_ref() {
                    return Self::of_sqlite(cause);
                }
                _ = cause;
                Self::Refused
            }
            sqlx::Error::PoolTimedOut => Self::Contention,
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed => Self::Lost,
            sqlx::Error::Configuration(_) => Self::Misconfigured,
            // Noticed before the statement was sent: a type that the database does not know, an
            // argument that cannot be encoded. Or behind its answer.
            _ => Self::Refused,
        }
    }

    #[cfg(feature = "postgres")]
    fn of_postgres(error: &sqlx::postgres::PgDatabaseError) -> Self {
        use sqlx::postgres::PgSeverity::{Fatal, Panic};
        match error.code() {
            // lock_not_available, query_canceled (by statement_timeout)
            "55P03" | "57014" => Self::Contention,
            // deadlock_detected, serialization_failure
            "40P01" | "40001" => Self::Collision,
            // internal_error, from Citus while a shard moves: the function was planned for the worker that had it
            "XX000" if error.message().contains("from a query on a shard") => Self::Collision,
            // feature_not_supported
            "0A000" => Self::Unsupported,
            // undefined_table, undefined_column, undefined_function
            "42P01" | "42703" | "42883" => Self::Missing,
            // insufficient_privilege, as of a missing right or of row-level security
            "42501" => Self::Misconfigured,
            // object_not_in_prerequisite_state, from `refuse_incomplete`
            "55000" if error.message().starts_with("floors has no row") => Self::Misconfigured,
            "TF428" => Self::Unfenced,
            // idle_in_transaction_session_timeout, transaction_timeout
            "25P03" | "25P04" => Self::Ended,
            _ if matches!(error.severity(), Fatal | Panic) => Self::Lost,
            code if is_unusable(code) => Self::Unusable,
            _ => Self::Refused,
        }
    }

    #[cfg(feature = "sqlite")]
    fn of_sqlite(error: &sqlx::sqlite::SqliteError) -> Self {
        use sqlx::error::DatabaseError;
        let code = error.code().and_then(|code| code.parse::<i32>().ok());
        let message = error.message();
        // The low byte is the primary result code.
        match code.map(|code| code & 0xff) {
            // SQLITE_BUSY, SQLITE_LOCKED
            Some(5 | 6) => Self::Contention,
            // SQLITE_IOERR, SQLITE_CORRUPT
            Some(10 | 11) => Self::Lost,
            // SQLITE_ERROR has no codes of its own for these.
            Some(1) if message.contains("no such table") || message.contains("no such column") => {
                Self::Missing
            }
            _ => Self::Refused,
        }
    }

    /// Whether the connection is gone. Where it was only silent, waiting for another one would take
    /// as long again.
    pub(super) const fn is_gone(self) -> bool {
        matches!(self, Self::Ended | Self::Lost | Self::Unusable)
    }
}

/// Whether this SQLSTATE of an error, which has rolled its transaction back, says that the session is of no use.
#[cfg(feature = "postgres")]
fn is_unusable(code: &str) -> bool {
    match code {
        // protocol_violation, with which the server answers a statement with too many or too few arguments
        "08P01" => false,
        // read_only_sql_transaction, admin_shutdown, crash_shutdown, cannot_connect_now
        "25006" | "57P01" | "57P02" | "57P03" => true,
        // connection_exception
        _ => code.starts_with("08"),
    }
}

/// What the failure of a handler's own statement is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandlerFault {
    /// Another transaction was in the way.
    Busy,
    /// The database is out of reach.
    Unavailable,
    /// It writes to a protected table what was not admitted.
    Unfenced,
    /// A bug, or a violated constraint: the handler's own business.
    Own,
}

impl Fault {
    pub(crate) const fn of_handler(self) -> HandlerFault {
        match self {
            Self::Contention | Self::Collision => HandlerFault::Busy,
            Self::Lost | Self::Silent | Self::Unusable => HandlerFault::Unavailable,
            Self::Unfenced => HandlerFault::Unfenced,
            Self::Unsupported
            | Self::Missing
            | Self::Misconfigured
            | Self::Refused
            | Self::Ended => HandlerFault::Own,
        }
    }
}

/// What happened, and the error for people.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(super) fault: Fault,
    pub(super) cause: Arc<sqlx::Error>,
}

impl Failure {
    /// A time limit ran out while the database had not answered.
    pub(super) fn silent() -> Self {
        let silent = "the database did not answer in time";
        Self {
            fault: Fault::Silent,
            cause: Arc::new(IoError::new(ErrorKind::TimedOut, silent).into()),
        }
    }

    /// A write to the same resource is under way in this process, for longer than the wait.
    pub(super) fn in_use() -> Self {
        let in_use = "another request of this process is writing to the resource";
        Self {
            fault: Fault::Contention,
            cause: Arc::new(IoError::new(ErrorKind::WouldBlock, in_use).into()),
        }
    }

    /// The tables of the fence are not there.
    pub(super) fn not_migrated() -> Self {
        let missing = "the tables of the fence are missing: call `Fence::migrate` first";
        Self {
            fault: Fault::Missing,
            cause: Arc::new(sqlx::Error::Configuration(missing.into())),
        }
    }

    /// The same, for the reason that the pool had no connection to give.
    pub(super) fn with_fault(self, fault: Fault) -> Self {
        Self { fault, ..self }
    }
}

/// Classes of SQLSTATE that a server answers COMMIT with, or what stands before it, only where nothing is committed:
/// a violated constraint, an invalid value, a transaction that is not open or has failed, a collision, an error of a
/// trigger.
const NOT_COMMITTED: [&str; 6] = ["22", "23", "25", "3B", "40", "P0"];

impl Failure {
    /// The failure of a COMMIT on other servers. Citus commits one worker without a second phase, and what comes
    /// after that may fail as well: a lost connection, a cancellation, a shutdown.
    pub(super) fn at_distributed_commit(self) -> Self {
        let code = self
            .cause
            .as_database_error()
            .and_then(|error| error.code());
        let is_certain = code.is_some_and(|code| {
            self.fault == Fault::Unfenced
                || NOT_COMMITTED.iter().any(|class| code.starts_with(class))
        });
        if is_certain {
            return self;
        }
        self.with_fault(Fault::Lost)
    }
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self {
            fault: Fault::of(&error),
            cause: Arc::new(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_out_of_reach_is_told_from_what_is_refused() {
        let broken = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        for (error, fault) in [
            (sqlx::Error::PoolTimedOut, Fault::Contention),
            (sqlx::Error::Io(broken()), Fault::Lost),
            (sqlx::Error::Tls(Box::new(broken())), Fault::Lost),
            (sqlx::Error::Protocol("odd".into()), Fault::Lost),
            (sqlx::Error::PoolClosed, Fault::Lost),
            (sqlx::Error::WorkerCrashed, Fault::Lost),
            (sqlx::Error::RowNotFound, Fault::Refused),
            (
                sqlx::Error::Configuration("odd".into()),
                Fault::Misconfigured,
            ),
        ] {
            assert_eq!(Fault::of(&error), fault, "{error}");
        }
        for fault in [Fault::Ended, Fault::Lost, Fault::Unusable] {
            assert!(fault.is_gone());
        }
        for fault in [Fault::Silent, Fault::Contention, Fault::Refused] {
            assert!(!fault.is_gone());
        }
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn a_statement_with_wrong_arguments_keeps_its_session() {
        for code in ["25006", "57P01", "57P02", "57P03", "08000", "08006"] {
            assert!(is_unusable(code), "{code}");
        }
        for code in ["08P01", "57014", "57P04", "25001", "42501"] {
            assert!(!is_unusable(code), "{code}");
        }
    }
}
