//! What passes between two attempts of a request that met others on its way.

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Random pauses, longer each time.
pub(super) struct Pauses(Duration);

pub(super) const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(300);

impl Default for Pauses {
    fn default() -> Self {
        Self(SHORTEST_PAUSE)
    }
}

impl Pauses {
    /// Waits, at most until then.
    pub(super) async fn pause(&mut self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        sleep(self.0.mul_f64(rand::random_range(0.1..1.5)).min(left)).await;
        self.0 = (2 * self.0).min(LONGEST_PAUSE);
    }
}
