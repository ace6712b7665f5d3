//! Limit for log lines that clients cause, so that a client cannot flood the log.

use std::{
    mem,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Minimum time between two lines of the same kind.
const BETWEEN_LINES: Duration = Duration::from_secs(1);

/// Limits the lines of one kind to one per second, and counts the suppressed lines.
#[derive(Debug, Default)]
pub struct Sampler(Mutex<Sampled>);

#[derive(Debug, Default)]
struct Sampled {
    last_line: Option<Instant>,
    suppressed: u64,
}

impl Sampler {
    pub const fn new() -> Self {
        Self(Mutex::new(Sampled {
            last_line: None,
            suppressed: 0,
        }))
    }

    /// Returns the number of lines that were suppressed since the last one, or `None` if this line
    /// must be suppressed as well.
    pub fn next(&self) -> Option<u64> {
        // No code panics while it holds the lock.
        let mut sampled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let is_early = |last| now.duration_since(last) < BETWEEN_LINES;
        if sampled.last_line.is_some_and(is_early) {
            sampled.suppressed += 1;
            return None;
        }
        sampled.last_line = Some(now);
        Some(mem::take(&mut sampled.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn repeated_log_lines_are_sampled_and_counted() {
        let sampler = Sampler::new();
        let (mut lines, mut suppressed) = (0, 0);
        for _ in 0..1_000 {
            if let Some(left_out) = sampler.next() {
                lines += 1;
                suppressed += left_out;
            }
            tokio::time::advance(Duration::from_millis(3)).await;
        }
        assert_eq!(lines, 3);
        // The next line reports the events that were suppressed since the previous line.
        tokio::time::advance(BETWEEN_LINES).await;
        suppressed += sampler.next().unwrap();
        assert_eq!(lines + suppressed, 1_000);
        tokio::time::advance(BETWEEN_LINES).await;
        assert_eq!(sampler.next(), Some(0));
    }
}
