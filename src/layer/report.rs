//! Reports of admissions and refusals to the log, the metrics and the console. Each kind of line
//! about tokens is logged at most once per second: stale tokens, used tokens, unsigned tokens, and
//! each reason for a forged token.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    events, fence::Claims, header::FencingToken, metrics, problem::ProblemType, stale::StaleToken,
    token_keys::Forged,
};

/// Reports an admitted request to the metrics (once) and to the console (once for each resource).
pub(super) fn admitted(claims: &Claims, is_read: bool) {
    let kind = if is_read { "read" } else { "write" };
    metrics::count_by("tower_fence_admitted_total", "kind", kind);
    for claim in claims.iter() {
        events::admitted(&claim.resource, claim.token, is_read);
    }
}

/// Minimum time between two log lines.
const BETWEEN_LINES: Duration = Duration::from_secs(1);

/// Limits log lines to one per second, and counts the suppressed events.
struct Sampler(Mutex<Sampled>);

struct Sampled {
    last_line: Option<Instant>,
    suppressed: u64,
}

// All layers share these samplers, because they write to the same log.
static STALE: Sampler = Sampler::new();
static USED: Sampler = Sampler::new();
static UNSIGNED: Sampler = Sampler::new();
static INCOMPLETE: Sampler = Sampler::new();
static UNKNOWN_KEY: Sampler = Sampler::new();
static WRONG_MAC: Sampler = Sampler::new();
static ACCEPTED: Sampler = Sampler::new();

/// Logs the refusal of a stale token, at most once per second. The metrics count each refusal.
pub(super) fn stale(stale: &StaleToken) {
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

/// Logs the refusal of a used token, at most once per second. Either the holder has written twice
/// under one token, or a request was repeated.
pub(super) fn used(stale: &StaleToken) {
    if let Some(suppressed) = USED.next() {
        tracing::warn!(
            problem = ProblemType::StaleToken.name(),
            resource = %stale.resource,
            presented_token = stale.presented_token.get(),
            suppressed,
            "refused a token that was used already"
        );
    }
}

/// Logs why a token counts as forged, because the response does not contain the reason. Each reason
/// has its own sampler. Many refusals for one reason therefore do not hide the refusals for another
/// reason, such as those after a failed key rotation.
pub(super) fn forged(token: &FencingToken, why: &Forged) {
    let sampler = match why {
        Forged::Unsigned => &UNSIGNED,
        Forged::Incomplete => &INCOMPLETE,
        Forged::UnknownKey(_) => &UNKNOWN_KEY,
        Forged::WrongMac(_) => &WRONG_MAC,
    };
    if let Some(suppressed) = sampler.next() {
        tracing::warn!(
            problem = ProblemType::ForgedToken.name(),
            resource = token.resource.as_ref().map(tracing::field::display),
            presented_token = token.token.get(),
            %why,
            suppressed,
            "refused a token that the issuer has not signed"
        );
    }
}

/// Logs an accepted unsigned token, so that an operator can find its sender.
pub(super) fn unsigned(token: &FencingToken) {
    if let Some(suppressed) = ACCEPTED.next() {
        tracing::info!(
            resource = token.resource.as_ref().map(tracing::field::display),
            presented_token = token.token.get(),
            suppressed,
            "accepted a token without a signature"
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

    /// Returns the number of events that were suppressed since the last log line, or `None` if this
    /// event must be suppressed as well.
    fn next(&self) -> Option<u64> {
        // No code panics while it holds the lock.
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

/// Runs a function and returns everything that this thread logs during the call.
#[cfg(test)]
pub(super) fn captured(run: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Log(std::sync::Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    let log = Log::default();
    let to_log = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || to_log.clone());
    tracing::subscriber::with_default(subscriber.finish(), run);
    let bytes = log.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
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
