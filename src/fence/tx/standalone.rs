//! A statement that is a transaction of its own.

use tokio::time::timeout;

use super::clean_up::CleanUp;
use crate::fence::{
    conn::{CheckedOut, Connections, Origin},
    fault::Failure,
    settings::Limits,
    sql::{AdvisoryLock, Backend},
};

/// A connection for one statement that commits by itself. Dropped while the statement is under way,
/// its outcome is unknown, and nothing leaks.
pub(in crate::fence) struct StandaloneStatement<DB: Backend> {
    checked_out: Option<CheckedOut<DB>>,
    connections: Connections<DB>,
    limits: Limits,
    lock: AdvisoryLock,
    phase: Phase,
}

#[derive(PartialEq)]
enum Phase {
    /// The statement was sent, and not answered.
    UnderWay,
    /// The connection can be used again.
    Clean,
    /// The connection must not be used again.
    Broken,
}

impl<DB: Backend> StandaloneStatement<DB> {
    /// Takes a connection. Where the statement failed on one that had died, nobody could know its
    /// outcome; so a connection that was not in use a moment ago is tested.
    pub(in crate::fence) async fn ready(
        connections: &Connections<DB>,
        limits: Limits,
    ) -> Result<Self, Failure> {
        let mut checked_out = connections.check_out(limits).await?;
        checked_out.end_early_transaction();
        if checked_out.origin == Origin::Idle && !checked_out.lives().await {
            checked_out.conn.close_on_drop();
            checked_out = connections.check_out_tested(limits).await?;
        }
        Ok(Self {
            checked_out: Some(checked_out),
            connections: connections.clone(),
            limits,
            lock: AdvisoryLock::random(),
            phase: Phase::Clean,
        })
    }

    /// Runs it, within the time that an open transaction would have.
    pub(in crate::fence) async fn run<T>(
        mut self,
        statement: impl AsyncFnOnce(&mut DB::Connection, AdvisoryLock) -> sqlx::Result<T>,
    ) -> Result<T, Failure> {
        let within = self.limits.statement().saturating_add(self.limits.hold);
        self.phase = Phase::UnderWay;
        let checked_out = self.checked_out.as_mut().expect(HELD);
        let answer = timeout(within, statement(&mut checked_out.conn, self.lock)).await;
        let Ok(outcome) = answer else {
            self.phase = Phase::Broken;
            // What it has locked must not stay so until it ends by itself.
            let (connections, lock, limits) = (self.connections.clone(), self.lock, self.limits);
            tokio::spawn(async move { connections.terminate(Some(lock), limits).await });
            return Err(Failure::silent());
        };
        let outcome = outcome.map_err(Failure::from);
        self.phase = match &outcome {
            Err(failure) if failure.fault.is_gone() => Phase::Broken,
            _ => Phase::Clean,
        };
        outcome
    }
}

/// Only `drop` takes the connection.
const HELD: &str = "the connection is held until the statement is gone";

impl<DB: Backend> Drop for StandaloneStatement<DB> {
    fn drop(&mut self) {
        let Some(mut checked_out) = self.checked_out.take() else {
            return;
        };
        match self.phase {
            Phase::Clean => self.connections.check_in(checked_out, self.limits),
            Phase::Broken => checked_out.conn.close_on_drop(),
            Phase::UnderWay => CleanUp {
                checked_out,
                connections: self.connections.clone(),
                limits: self.limits,
                lock: Some(self.lock),
                beginning: false,
            }
            .spawn(),
        }
    }
}
