//! Tokio's clock for tests whose result would otherwise depend on the speed of the machine.
//!
//! A test without connections needs only `#[tokio::test(start_paused = true)]`: tokio then advances
//! the clock whenever all tasks wait for it. It would also do so while they wait for an answer over
//! a connection. [`StoppedClock`] stops the clock for such tests.

use std::{sync::mpsc, time::Duration};

use crate::PATIENCE;

/// The stopped clock of a runtime that has a single thread. On drop, the clock continues.
pub struct StoppedClock {
    _is_stopped: mpsc::Sender<()>,
}

impl StoppedClock {
    pub fn stop() -> Self {
        let (is_stopped, ended) = mpsc::channel();
        // Tokio does not advance a paused clock while a blocking task runs.
        tokio::task::spawn_blocking(move || ended.recv());
        tokio::time::pause();
        Self {
            _is_stopped: is_stopped,
        }
    }

    pub async fn advance(&self, time: Duration) {
        tokio::time::advance(time).await;
    }

    /// Advances the clock until it is dropped.
    pub async fn run(&self) {
        loop {
            self.advance(Duration::from_millis(1)).await;
        }
    }

    /// Waits until `condition` holds, while the clock stands still.
    pub async fn until(&self, what: &str, mut condition: impl AsyncFnMut() -> bool) {
        let deadline = std::time::Instant::now() + PATIENCE;
        while !condition().await {
            assert!(
                std::time::Instant::now() < deadline,
                "never happened: {what}"
            );
            tokio::task::yield_now().await;
        }
    }
}

impl Drop for StoppedClock {
    fn drop(&mut self) {
        tokio::time::resume();
    }
}
