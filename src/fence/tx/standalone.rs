//! [`StandaloneStatement`]: a statement that commits by itself.

use std::time::Duration;

use super::session::{Phase, Session, response};
use crate::fence::{
    conn::{CheckedOut, Connections, Origin},
    fault::Failure,
    settings::Limits,
    sql::{On, Transactions},
};

/// Timeout for the response to the test of a connection that may be broken.
const TEST_TIMEOUT: Duration = Duration::from_secs(1);

/// Connection for one statement that commits by itself. If this value is dropped while the
/// statement is running, the outcome is unknown, and no connection leaks.
pub(in crate::fence) struct StandaloneStatement<DB: Transactions> {
    session: Session<DB>,
}

impl<DB: Transactions> StandaloneStatement<DB> {
    /// Takes a connection, and tests it unless the fence itself has just used it. On a closed
    /// connection, the outcome of the statement would be unknown. If the application had left a
    /// transaction open on the connection, the statement would not be committed. The test detects
    /// both cases.
    ///
    /// The test also configures the session so that the server detects a client that disconnects,
    /// because a single statement cannot do this for itself. Therefore the test also runs on a
    /// reused connection that has not been tested before.
    pub(in crate::fence) async fn ready(
        connections: &Connections<DB>,
        limits: Limits,
    ) -> Result<Self, Failure> {
        let mut checked_out = connections.check_out(limits).await?;
        checked_out.end_early_transaction();
        let is_ready = checked_out.origin == Origin::Kept && checked_out.is_prepared;
        let answer_timeout = limits.answer_timeout;
        let test_timeout = answer_timeout.min(TEST_TIMEOUT);
        if !is_ready
            && prepare_session(&mut checked_out, test_timeout)
                .await
                .is_err()
        {
            // The connection cannot be used, so use one that the pool has tested.
            checked_out.close_on_drop();
            // Release the permit of this connection first. It may be the only permit of the pool.
            drop(checked_out);
            checked_out = connections.check_out_tested(limits).await?;
            if let Err(failure) = prepare_session(&mut checked_out, answer_timeout).await {
                connections.close_idle();
                checked_out.close_on_drop();
                return Err(failure);
            }
        }
        Ok(Self {
            session: Session::new(checked_out, connections, limits),
        })
    }

    /// Runs the statement. If the response does not arrive `within` this time, the connection is
    /// closed, and the outcome is unknown.
    pub(in crate::fence) async fn run<T>(
        mut self,
        within: Duration,
        statement: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        let session = &mut self.session;
        session.phase = Phase::Open;
        let outcome = session.run(within, statement).await;
        if session.phase == Phase::Open {
            session.phase = Phase::Clean;
        }
        outcome
    }
}

/// Ends the transaction that is open on the connection, if there is one, and prepares the session
/// for statements that commit by themselves.
async fn prepare_session<DB: Transactions>(
    checked_out: &mut CheckedOut<DB>,
    within: Duration,
) -> Result<(), Failure> {
    response(within, DB::leave_transaction(checked_out)).await?;
    checked_out.is_prepared = true;
    Ok(())
}
