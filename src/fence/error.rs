//! What can go wrong at the fence, one type for each of its two moments: admission and COMMIT.

use std::sync::Arc;

use super::fault::{Failure, Fault};
pub use crate::stale::StaleToken;

/// Why a token was not admitted. Nothing was written.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// The token is stale.
    #[error(transparent)]
    Stale(#[from] StaleToken),
    /// No resource was named.
    #[error("a fenced transaction needs at least one resource")]
    NoResource,
    /// The wait for the row lock or for a connection ran out, or the transaction collided with
    /// another one. Trying again may help.
    #[error("the fence is busy")]
    Busy(#[source] Arc<sqlx::Error>),
    /// The database cannot be reached, or cannot do its work.
    #[error("the fence's database is unavailable")]
    Unavailable(#[source] Arc<sqlx::Error>),
    /// The tables of the fence are missing or of an older version.
    #[error("the fence is not set up in the database: call `Fence::migrate`")]
    NotMigrated(#[source] Arc<sqlx::Error>),
    /// The database is not set up for the fence: the role lacks a right, `PUBLIC` may execute the fence's functions, row-level
    /// security hides rows of the fence, or rows are missing that [`Fence::migrate`](super::Fence::migrate) has made. The cause names it, and
    /// it does not pass by itself.
    #[error("the fence's database is misconfigured")]
    Misconfigured(#[source] Arc<sqlx::Error>),
}

impl AdmitError {
    /// Whether it does not pass by itself: the database has to be set up first.
    pub(crate) const fn is_misconfigured(&self) -> bool {
        matches!(self, Self::NotMigrated(_) | Self::Misconfigured(_))
    }
}

/// What a failed statement of the fence means to the one who wanted to write.
impl From<Failure> for AdmitError {
    fn from(Failure { fault, cause }: Failure) -> Self {
        match fault {
            Fault::Contention | Fault::Collision => Self::Busy(cause),
            Fault::Missing => Self::NotMigrated(cause),
            Fault::Misconfigured => Self::Misconfigured(cause),
            Fault::Unusable
            | Fault::Unsupported
            | Fault::Unfenced
            | Fault::Refused
            | Fault::Ended
            | Fault::Lost
            | Fault::Silent => Self::Unavailable(cause),
        }
    }
}

/// What the failed COMMIT of a transaction that only raises the fence, or reads, means to its caller: the
/// fence may be where it was.
impl From<CommitError> for AdmitError {
    fn from(error: CommitError) -> Self {
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

/// Why a transaction was not committed, or is not known to be.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// The transaction had failed before, or failed at COMMIT. Nothing was written.
    #[error("the transaction was aborted")]
    Aborted(#[source] Arc<sqlx::Error>),
    /// What was left for COMMIT, a deferred trigger of the application, writes to a protected table what
    /// was not admitted. Nothing was written.
    #[error("a protected table was written without an admission")]
    Unfenced(#[source] Arc<sqlx::Error>),
    /// A nested transaction was still open. Nothing was written.
    #[error("a nested transaction was neither committed nor rolled back")]
    Unfinished,
    /// COMMIT collided with another transaction. Nothing was written.
    #[error("the database was busy at COMMIT")]
    Busy(#[source] Arc<sqlx::Error>),
    /// The connection was lost before COMMIT was sent, or its session was of no use. Nothing was written.
    #[error("the database became unavailable before COMMIT")]
    Unavailable(#[source] Arc<sqlx::Error>),
    /// The handler tried to commit by itself, in a request whose response must be stored together
    /// with the write. Nothing was written.
    #[error("under an idempotency key the layer commits, with the response: return it instead")]
    Unrecorded,
    /// The response it was lent for is gone. Nothing was written.
    #[error("the transaction outlived the request that it was lent to")]
    Escaped,
    /// The answer to COMMIT was lost: the writes may or may not be there.
    #[error("the outcome of COMMIT is unknown")]
    OutcomeUnknown(#[source] Arc<sqlx::Error>),
}

impl CommitError {
    /// What the failure of COMMIT means.
    pub(super) fn at_commit(Failure { fault, cause }: Failure) -> Self {
        match fault {
            Fault::Contention | Fault::Collision => Self::Busy(cause),
            Fault::Unfenced => Self::Unfenced(cause),
            Fault::Unsupported
            | Fault::Missing
            | Fault::Misconfigured
            | Fault::Refused
            | Fault::Ended => Self::Aborted(cause),
            Fault::Unusable => Self::Unavailable(cause),
            Fault::Lost | Fault::Silent => Self::OutcomeUnknown(cause),
        }
    }

    /// What the failure of a statement means that stood before COMMIT, which was not sent.
    pub(super) fn before_commit(failure: Failure) -> Self {
        match Self::at_commit(failure) {
            Self::OutcomeUnknown(cause) => Self::Unavailable(cause),
            error => error,
        }
    }
}

/// Why a statement that was to be written at once was not, or is not known to be.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The token was not admitted. Nothing was written.
    #[error(transparent)]
    Admit(#[from] AdmitError),
    /// The statement failed. Nothing was written.
    #[error("the statement failed")]
    Statement(#[source] Arc<sqlx::Error>),
    /// The database cannot run such a statement together with its admission: rules rewrite it, for
    /// example. Nothing was written. A [`FencedTx`](super::FencedTx) can.
    #[error("the database cannot run this statement together with its admission: use a `FencedTx`")]
    Unsupported(#[source] Arc<sqlx::Error>),
    /// The statement does not name `fence`, so it cannot depend on whether its token is admitted. It was not
    /// run.
    #[error("the statement does not depend on `fence`: add `AND EXISTS (SELECT 1 FROM fence)`")]
    Independent,
    /// The rows are not of the type that was asked for. They were written; under an idempotency key of a
    /// `FenceLayer` they are rolled back unless the handler answers a success.
    #[error("the rows that were written are of another type")]
    Rows(#[source] Arc<sqlx::Error>),
    /// The transaction was not committed, or is not known to be.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

impl WriteError {
    pub(super) fn statement(error: sqlx::Error) -> Self {
        Self::Statement(Arc::new(error))
    }

    /// What a failed statement means in an open transaction.
    pub(super) fn in_transaction(Failure { fault, cause }: Failure) -> Self {
        match fault {
            Fault::Contention | Fault::Collision => AdmitError::Busy(cause).into(),
            Fault::Unsupported => Self::Unsupported(cause),
            Fault::Unfenced
            | Fault::Missing
            | Fault::Misconfigured
            | Fault::Refused
            | Fault::Ended => Self::Statement(cause),
            Fault::Unusable | Fault::Lost | Fault::Silent => AdmitError::Unavailable(cause).into(),
        }
    }

    /// What a failed statement means that would have been its own COMMIT.
    pub(super) fn alone(failure: Failure) -> Self {
        match failure.fault {
            Fault::Lost | Fault::Silent => CommitError::OutcomeUnknown(failure.cause).into(),
            _ => Self::in_transaction(failure),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_that_commits_and_is_not_answered_may_have_been_written() {
        let failure = |fault| Failure {
            fault,
            cause: Arc::new(sqlx::Error::RowNotFound),
        };
        for fault in [Fault::Lost, Fault::Silent] {
            assert!(matches!(
                WriteError::alone(failure(fault)),
                WriteError::Commit(CommitError::OutcomeUnknown(_))
            ));
            assert!(matches!(
                WriteError::in_transaction(failure(fault)),
                WriteError::Admit(AdmitError::Unavailable(_))
            ));
        }
        assert!(matches!(
            WriteError::alone(failure(Fault::Collision)),
            WriteError::Admit(AdmitError::Busy(_))
        ));
    }
}
