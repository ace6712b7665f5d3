//! One line about stale writers a second, whatever storm of them comes.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::{problem::ProblemType, stale::StaleToken};

/// The time from one line to the next.
const BETWEEN_LINES: Duration = Duration::from_secs(1);

/// Lets the first through and one a second, and counts the others.
struct Sampler(Mutex<Sampled>);

struct Sampled {
    last_line: Option<Instant>,
    suppressed: u64,
}

/// Of the whole process: a log is read line by line, whichever layer wrote it.
static STALE: Sampler = Sampler::new();

/// Writes a line about a refusal, unless one was written just now. Each is counted in the metrics.
pub(super) fn refused(stale: &StaleToken) {
    if let Some(suppressed) = STALE.next() {
        tracing::warn!(
            problem = ProblemType::StaleToken.name(),
            resource = %stale.resource,
            presented_token = stale.presented_token.get(),
            max_token = stale.max_token,
            suppressed,
            "refused a stale writer"
        );
    }
}

impl Sampler {
    const fn new() -> Self {
        Self(Mutex::new(Sampled {
            last_line: None,
            suppressed: 0,
        }))
    }

    /// How many were left out since the last line; `None` where this one is left out as well.
    fn next(&self) -> Option<u64> {
        // Nothing panics while the lock is held.
        let mut sampled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if sampled
            .last_line
            .is_some_and(|last| now.duration_since(last) < BETWEEN_LINES)
        {
            sampled.suppressed += 1;
            return None;
        }
        sampled.last_line = Some(now);
        Some(std::mem::take(&mut sampled.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_storm_is_a_few_lines_and_the_counts_add_up() {
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
        // Those since the last line are told by the next one.
        tokio::time::advance(BETWEEN_LINES).await;
        suppressed += sampler.next().unwrap();
        assert_eq!(lines + suppressed, 1_000);
        tokio::time::advance(BETWEEN_LINES).await;
        assert_eq!(sampler.next(), Some(0));
    }
}
