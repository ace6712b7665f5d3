//! A release with retries.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower_fence::{
    Resource,
    client::HttpError,
    lease::{LeaseError, LeaseId, Leases},
};

use super::signals::Signals;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The time limits for the retries of a release.
#[derive(Clone, Copy)]
pub struct Schedule {
    /// No retry begins after this time.
    pub until: Instant,
    /// Until this time, "not held" is retried, because the request that acquires the lease may
    /// still be in transit.
    pub not_held_until: Instant,
}

/// The outcome of a release.
pub enum Released {
    /// This release removed the lease.
    Done,
    /// The lease was not held under this id.
    NotHeld,
    /// There was no answer. The lease will expire.
    Failed(LeaseError),
}

/// Releases a lease. Retries within the limits of `schedule`, until a signal asks this process to
/// end.
///
/// If an attempt gets no answer, and the answer to a later one is "not held", the earlier attempt
/// has released the lease.
pub async fn release<L: Leases>(
    leases: &L,
    resource: &Resource,
    id: &LeaseId,
    schedule: Schedule,
    signals: &mut Signals,
) -> Released {
    let mut may_be_released = false;
    let mut pause = FIRST_PAUSE;
    let mut is_first = true;
    loop {
        let error = match leases.release(resource, id).await {
            Ok(()) => return Released::Done,
            Err(error) => error,
        };
        let not_held = matches!(error, LeaseError::Lost { .. });
        if not_held && may_be_released {
            return Released::Done;
        }
        may_be_released |= may_be_executed(&error);
        let until = match not_held {
            true => schedule.not_held_until,
            false => schedule.until,
        };
        if is_first {
            // The Ctrl-C that ended the command has reached this process as well. It must not end
            // the retries.
            signals.clear();
        }
        is_first = false;
        let is_late = Instant::now() + pause >= until;
        if is_late || is_interrupted(pause, signals).await {
            return match not_held {
                true => Released::NotHeld,
                false => Released::Failed(error),
            };
        }
        if !not_held {
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}

/// Waits for a random part of `pause`, at least half of it. Returns whether a signal interrupted
/// the wait.
async fn is_interrupted(pause: Duration, signals: &mut Signals) -> bool {
    tokio::select! {
        () = sleep(pause.mul_f64(rand::random_range(0.5..1.0))) => false,
        _ = signals.interrupt() => true,
    }
}

/// Returns whether a request that failed with this error may have been executed.
pub fn may_be_executed(error: &LeaseError) -> bool {
    let LeaseError::Unavailable(cause) = error else {
        return false;
    };
    match cause.downcast_ref() {
        Some(HttpError::Request { source, .. }) => !source.is_connect(),
        Some(HttpError::Unexpected { status, .. }) => !status.is_client_error(),
        Some(HttpError::Url | HttpError::Header | HttpError::Client(_)) => false,
        _ => true,
    }
}
