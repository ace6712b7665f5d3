//! Errors of the fence: for admissions, for COMMIT, and for single-statement writes.

use std::sync::Arc;

use super::fault::{Failure, Fault};
use crate::problem::ProblemType;
pub use crate::stale::StaleToken;

/// Error returned when a token was not admitted. Nothing was written.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// The token is stale.
    #[error(transparent)]
    Stale(#[from] StaleToken),
    /// The call named no resource.
    #[error("a fenced transaction needs at least one resource")]
    NoResource,
    /// The wait for the row lock or for a connection timed out, or the transaction collided with
    /// another one. A retry may succeed.
    #[error("the fence is busy")]
    Busy(#[source] Arc<sqlx::Error>),
    /// The database is unreachable, or cannot execute the statements. If the call changes the fence
    /// itself, such as [`Fence::reset`](super::Fence::reset), the change may have been committed.
    #[error("the fence's database is unavailable")]
    Unavailable(#[source] Arc<sqlx::Error>),
    /// The tables of the fence are missing or outdated.
    #[error("the fence is not set up in the database: call `Fence::migrate`")]
    NotMigrated(#[source] Arc<sqlx::Error>),
    /// The database is not set up correctly. The role lacks a privilege, `PUBLIC` may execute the
    /// fence's functions, row-level security hides rows of the fence, or rows that
    /// [`Fence::migrate`](super::Fence::migrate) has inserted are missing. The source of the error
    /// has the details. A retry does not help.
    #[error("the fence's database is misconfigured")]
    Misconfigured(#[source] Arc<sqlx::Error>),
}

impl AdmitError {
    /// Returns the problem type of a response that reports this error.
    #[must_use]
    pub const fn problem_type(&self) -> ProblemType {
        match self {
            Self::Stale(_) => ProblemType::StaleToken,
            Self::Busy(_) => ProblemType::FenceBusy,
            Self::Unavailable(_) => ProblemType::StoreUnavailable,
            Self::NoResource | Self::NotMigrated(_) | Self::Misconfigured(_) => {
                ProblemType::Misconfigured
            }
        }
    }

    /// Returns whether the database must be set up before a retry can succeed.
    pub(crate) const fn is_misconfigured(&self) -> bool {
        matches!(self, Self::NotMigrated(_) | Self::Misconfigured(_))
    }
}

impl From<Failure> for AdmitError {
    fn from(Failure { fault, cause }: Failure) -> Self {
        match fault {
            Fault::Contention | Fault::Collision => Self::Busy(cause),
            Fault::Missing => Self::NotMigrated(cause),
            Fault::Misconfigured => Self::Misconfigured(cause),
            Fault::Unsupported
            | Fault::Unfenced
            | Fault::Refused
            | Fault::Ended
            | Fault::Lost
            | Fault::Silent => Self::Unavailable(cause),
        }
    }
}

impl AdmitError {
    /// Converts the failed COMMIT of a transaction that only changes the fence or only reads. If
    /// the outcome is unknown, the change may have been committed.
    pub(super) fn at_commit(error: CommitError) -> Self {
        match error {
            CommitError::Busy(cause) => Self::Busy(cause),
            CommitError::Aborted(cause)
            | CommitError::Unfenced(cause)
            | CommitError::Unavailable(cause)
            | CommitError::OutcomeUnknown(cause) => Self::Unavailable(cause),
            CommitError::Unfinished | CommitError::Escaped | CommitError::Unrecorded => {
                Self::Unavailable(sqlx::Error::BeginFailed.into())
            }
        }
    }
}

/// Error returned when a transaction was not committed, or its outcome is unknown.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// A statement had failed before, or a deferred constraint failed at COMMIT. Nothing was
    /// written.
    #[error("the transaction was aborted")]
    Aborted(#[source] Arc<sqlx::Error>),
    /// A deferred trigger of the application wrote to a protected table at COMMIT, under a resource
    /// that was not admitted. Nothing was written.
    #[error("a protected table was written without an admission")]
    Unfenced(#[source] Arc<sqlx::Error>),
    /// A nested transaction was still open, or a nested `begin` that did not complete has ended the
    /// transaction. Nothing was written.
    #[error("a nested transaction was neither committed nor rolled back")]
    Unfinished,
    /// COMMIT collided with another transaction, or could not get a lock. Nothing was written.
    #[error("the database was busy at COMMIT")]
    Busy(#[source] Arc<sqlx::Error>),
    /// The connection was lost before COMMIT was sent, its session was unusable, or the disk of an
    /// SQLite database was full. Nothing was written.
    #[error("the database became unavailable before COMMIT")]
    Unavailable(#[source] Arc<sqlx::Error>),
    /// The handler tried to commit, although the layer must store the response together with the
    /// write. Nothing was written.
    #[error(
        "under an idempotency key the layer commits the transaction: return the response instead of committing"
    )]
    Unrecorded,
    /// The request that borrowed the transaction has already been answered. Nothing was written.
    #[error("the transaction was used after its request had ended")]
    Escaped,
    /// The response to COMMIT was lost or late. The writes may or may not have been committed.
    #[error("the outcome of COMMIT is unknown")]
    OutcomeUnknown(#[source] Arc<sqlx::Error>),
}

impl CommitError {
    pub(super) fn at_commit(failure: Failure) -> Self {
        let may_be_committed = failure.may_be_committed();
        let Failure { fault, cause } = failure;
        match fault {
            _ if may_be_committed => Self::OutcomeUnknown(cause),
            Fault::Contention | Fault::Collision => Self::Busy(cause),
            Fault::Unfenced => Self::Unfenced(cause),
            Fault::Unsupported
            | Fault::Missing
            | Fault::Misconfigured
            | Fault::Refused
            | Fault::Ended => Self::Aborted(cause),
            Fault::Lost | Fault::Silent => Self::Unavailable(cause),
        }
    }

    pub(super) fn before_commit(failure: Failure) -> Self {
        match Self::at_commit(failure) {
            Self::OutcomeUnknown(cause) => Self::Unavailable(cause),
            error => error,
        }
    }
}

/// Error returned when a single-statement write was not executed, or its outcome is unknown.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The token was not admitted. Nothing was written.
    #[error(transparent)]
    Admit(#[from] AdmitError),
    /// The statement failed, the type of an argument does not exist in the database, or the
    /// statement has a `$` with a number higher than the number of its arguments. Nothing was
    /// written.
    #[error("the statement failed")]
    Statement(#[source] Arc<sqlx::Error>),
    /// The database cannot combine this statement with the admission, for example because rules
    /// rewrite the statement. Nothing was written. A [`FencedTx`](super::FencedTx) can run the
    /// statement.
    #[error("the database cannot run this statement together with its admission: use a `FencedTx`")]
    Unsupported(#[source] Arc<sqlx::Error>),
    /// The statement does not name `fence`, so it cannot depend on the admission of its token. The
    /// statement was not executed.
    #[error("the statement does not depend on `fence`: add `AND EXISTS (SELECT 1 FROM fence)`")]
    Independent,
    /// The rows were written, but they do not have the requested type. Under an idempotency key of
    /// a `FenceLayer`, they are rolled back unless the handler responds with a success.
    #[error("the rows were written, but do not have the requested type")]
    Rows(#[source] Arc<sqlx::Error>),
    /// The transaction was not committed, or its outcome is unknown.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

impl WriteError {
    pub(super) fn statement(error: sqlx::Error) -> Self {
        Self::Statement(Arc::new(error))
    }

    pub(super) fn in_transaction(Failure { fault, cause }: Failure) -> Self {
        match fault {
            Fault::Contention | Fault::Collision => AdmitError::Busy(cause).into(),
            Fault::Unsupported => Self::Unsupported(cause),
            Fault::Unfenced
            | Fault::Missing
            | Fault::Misconfigured
            | Fault::Refused
            | Fault::Ended => Self::Statement(cause),
            Fault::Lost | Fault::Silent => AdmitError::Unavailable(cause).into(),
        }
    }

    pub(super) fn standalone(failure: Failure) -> Self {
        match failure.may_be_committed() {
            true => CommitError::OutcomeUnknown(failure.cause).into(),
            false => Self::in_transaction(failure),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unanswered_committing_statement_has_an_unknown_outcome() {
        let failure = |fault| Failure {
            fault,
            cause: Arc::new(sqlx::Error::RowNotFound),
        };
        for fault in [Fault::Lost, Fault::Silent] {
            assert!(matches!(
                WriteError::standalone(failure(fault)),
                WriteError::Commit(CommitError::OutcomeUnknown(_))
            ));
            assert!(matches!(
                WriteError::in_transaction(failure(fault)),
                WriteError::Admit(AdmitError::Unavailable(_))
            ));
        }
        assert!(matches!(
            WriteError::standalone(failure(Fault::Collision)),
            WriteError::Admit(AdmitError::Busy(_))
        ));
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn commit_on_a_full_disk_is_unavailable() {
        use sqlx::{Connection, SqliteConnection};
        let mut conn = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        let fill =
            "CREATE TABLE t (x); PRAGMA max_page_count = 2; INSERT INTO t VALUES (zeroblob(99999))";
        let full = sqlx::raw_sql(fill).execute(&mut conn).await.unwrap_err();
        assert!(matches!(
            CommitError::at_commit(full.into()),
            CommitError::Unavailable(_)
        ));
    }
}
