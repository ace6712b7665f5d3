//! State of a node for operators: whether calls to it have failed recently.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tower_fence::{chain::Chain, lease::LeaseError, metrics};

/// Time without a failure after which a node counts as usable. A single success is not enough: a
/// node whose memory is full answers reads between the grants that fail.
pub(crate) const QUIET: Duration = Duration::from_secs(60);

/// Time of the last failure of a node, or `None` if the node counts as usable. Further failures are
/// not logged until the node counts as usable again.
#[derive(Default)]
pub(crate) struct Health(Mutex<Option<Instant>>);

/// Change of the state of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Failed,
    Recovered,
}

impl Health {
    /// Records the outcome of a call, and reports a change in the log and in the metrics. Returns
    /// whether the node has just failed.
    pub(crate) fn note<T>(&self, node: &str, outcome: &Result<T, LeaseError>) -> bool {
        let change = self.change(outcome.is_ok(), Instant::now());
        match (change, outcome) {
            (Some(Change::Failed), Err(error)) => {
                metrics::quorum_nodes_failed(1.0);
                tracing::warn!(
                    node,
                    error = Chain(error).to_string(),
                    "a node of the quorum has failed; while the other nodes are a majority, they grant leases"
                );
            }
            (Some(Change::Recovered), _) => {
                metrics::quorum_nodes_failed(-1.0);
                tracing::info!(
                    node,
                    "a node of the quorum has recovered: it has not failed for a minute"
                );
            }
            _ => {}
        }
        change == Some(Change::Failed)
    }

    pub(crate) fn has_failed(&self) -> bool {
        lock(&self.0).is_some()
    }

    fn change(&self, is_success: bool, now: Instant) -> Option<Change> {
        let mut failed_at = lock(&self.0);
        match (*failed_at, is_success) {
            (last, false) => {
                *failed_at = Some(now);
                last.is_none().then_some(Change::Failed)
            }
            (Some(last), true) if now >= last + QUIET => {
                *failed_at = None;
                Some(Change::Recovered)
            }
            _ => None,
        }
    }
}

impl Drop for Health {
    fn drop(&mut self) {
        if lock(&self.0).is_some() {
            metrics::quorum_nodes_failed(-1.0);
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_is_reported_once_until_it_has_not_failed_for_a_minute() {
        let (health, start) = (Health::default(), Instant::now());
        let change = |is_success, seconds| {
            let now = start + Duration::from_secs(seconds);
            health.change(is_success, now)
        };
        assert_eq!(change(true, 0), None);
        assert_eq!(change(false, 1), Some(Change::Failed));
        // Reads succeed, and grants fail.
        for second in (2..100).step_by(2) {
            assert_eq!(change(true, second), None);
            assert_eq!(change(false, second + 1), None);
        }
        assert_eq!(change(true, 158), None);
        assert_eq!(change(true, 159), Some(Change::Recovered));
        assert_eq!(change(true, 160), None);
        assert_eq!(change(false, 161), Some(Change::Failed));
    }
}
