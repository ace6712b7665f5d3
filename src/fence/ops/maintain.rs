//! Maintenance in the background, which limits the size of the fence's tables.

use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::{
    chain::Chain,
    fence::{Fence, error::AdmitError, sql::FenceDatabase},
    metrics,
};

/// Time for which a resource must be unused before its row is removed.
const IDLE: Duration = Duration::from_secs(90 * 24 * 60 * 60);
/// Minimum time between two removals of idle rows, because each removal reads all rows.
const BETWEEN_REMOVALS: Duration = Duration::from_secs(24 * 60 * 60);

impl<DB: FenceDatabase> Fence<DB> {
    /// Periodically removes expired idempotency keys, and the rows of resources that have not been
    /// used for 90 days.
    ///
    /// The first removal starts immediately. Afterwards, keys are removed at the interval `every`
    /// (at least 1 s), and rows at most once a day. The future never completes. Spawn it as a task,
    /// and abort the task at shutdown. Several processes may run `maintain` at the same time.
    ///
    /// The rows of resources are removed by [`remove_idle`](Self::remove_idle), which requires an
    /// issuer whose tokens increase across all resources. With any other issuer, call
    /// [`remove_expired_keys`](Self::remove_expired_keys) in a loop instead. If a lease outside of
    /// this database may be held for 90 days without a write, also call
    /// [`remove_idle_below`](Self::remove_idle_below) in that loop. A [distributed
    /// fence](crate::guide::citus#not-available-on-a-distributed-fence) keeps the rows of
    /// resources.
    ///
    /// A failure is logged and counted ([`metrics`]), and the removal is retried after the
    /// interval.
    ///
    /// ```no_run
    /// # async fn example(fence: tower_fence::Fence<sqlx::Postgres>) {
    /// use std::time::Duration;
    ///
    /// let hour = Duration::from_secs(3_600);
    /// let maintenance = tokio::spawn(async move { fence.maintain(hour).await });
    /// // … serve …
    /// maintenance.abort();
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the batch in progress is removed as a whole or not at all.
    pub async fn maintain(&self, every: Duration) {
        let mut ticks = interval(every.max(Duration::from_secs(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_removal: Option<Instant> = None;
        loop {
            let now = ticks.tick().await;
            report_removal("keys", self.remove_expired_keys().await);
            let names = self.checked_names().await;
            if !names.is_ok_and(|names| names.is_distributed())
                && last_removal.is_none_or(|last| now - last >= BETWEEN_REMOVALS)
                && report_removal("resources", self.remove_idle(IDLE, u64::MAX).await)
            {
                last_removal = Some(now);
            }
        }
    }
}

/// Reports the outcome of a removal, and returns whether it was successful.
fn report_removal(kind: &'static str, outcome: Result<u64, AdmitError>) -> bool {
    match &outcome {
        Ok(0) => {}
        Ok(count) => {
            metrics::add("tower_fence_removed_total", "kind", kind, *count);
            tracing::info!(kind, count, "removed rows of the fence");
        }
        Err(error) => {
            metrics::count_by("tower_fence_maintenance_failures_total", "kind", kind);
            tracing::warn!(
                kind,
                error = Chain(error).to_string(),
                "cannot remove rows of the fence"
            );
        }
    }
    outcome.is_ok()
}
