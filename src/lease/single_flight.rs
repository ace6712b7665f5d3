//! Single-flight execution: requests that wait for an attempt share its failure.

use std::sync::OnceLock;

use derive_where::derive_where;
use tokio::{
    sync::{Mutex, MutexGuard},
    time::Instant,
};

use super::LeaseError;

/// Mutex that admits one attempt at a time, and keeps the last failure.
#[derive(Default)]
pub(super) struct SingleFlight(Mutex<Option<(Instant, LeaseError)>>);

/// Current attempt. When it is dropped, the next attempt may begin.
pub(super) struct Flight<'a>(MutexGuard<'a, Option<(Instant, LeaseError)>>);

impl SingleFlight {
    /// Waits until no other attempt is running.
    ///
    /// # Errors
    ///
    /// Returns the failure of an attempt that ended during the wait. Therefore the callers that
    /// wait for a failing attempt do not repeat it one after the other.
    pub(super) async fn begin(&self) -> Result<Flight<'_>, LeaseError> {
        let asked_at = Instant::now();
        let last = self.0.lock().await;
        match &*last {
            Some((failed_at, error)) if *failed_at > asked_at => Err(error.clone()),
            _ => Ok(Flight(last)),
        }
    }
}

impl Flight<'_> {
    /// Ends the attempt with a failure, which is also returned to the callers that waited for it.
    pub(super) fn fail(mut self, error: LeaseError) -> LeaseError {
        *self.0 = Some((Instant::now(), error.clone()));
        error
    }
}

/// Value that is determined once. One attempt at a time determines it, until an attempt succeeds.
#[derive_where(Default)]
pub(super) struct OnceFlight<T> {
    value: OnceLock<T>,
    flight: SingleFlight,
}

impl<T> OnceFlight<T> {
    /// Returns the value, if it is known.
    pub(super) fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// Makes an attempt to determine the value, unless the value is known.
    ///
    /// # Errors
    ///
    /// Returns the failure of this attempt, or of an attempt that ended during the wait.
    pub(super) async fn determine<F>(&self, attempt: impl FnOnce() -> F) -> Result<(), LeaseError>
    where
        F: Future<Output = Result<T, LeaseError>>,
    {
        if self.get().is_some() {
            return Ok(());
        }
        let flight = self.flight.begin().await?;
        if self.get().is_none() {
            match attempt().await {
                Ok(value) => drop(self.value.set(value)),
                Err(error) => return Err(flight.fail(error)),
            }
        }
        Ok(())
    }
}
