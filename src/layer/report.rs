//! What the layer reports of admissions and refusals. The log has at most one line a second about stale
//! writers, one about used tokens, and one about forged tokens for each reason.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    events, fence::Claims, header::FencingToken, metrics, problem::ProblemType, stale::StaleToken,
    token_keys::Forged,
};

/// A write was admitted: one number for the metrics, and each resource for the console.
pub(super) fn write_admitted(claims: &Claims) {
    admitted("write", claims);
}

/// A fenced read was admitted.
pub(super) fn read_admitted(claims: &Claims) {
    admitted("read", claims);
}

fn admitted(kind: &'static str, claims: &Claims) {
    metrics::count_by("tower_fence_admitted_total", "kind", kind);
    for claim in claims.iter() {
        events::admitted(&claim.resource, claim.token, kind == "read");
    }
}

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
static USED: Sampler = Sampler::new();
static UNSIGNED: Sampler = Sampler::new();
static INCOMPLETE: Sampler = Sampler::new();
static UNKNOWN_KEY: Sampler = Sampler::new();
static WRONG_MAC: Sampler = Sampler::new();
static ACCEPTED: Sampler = Sampler::new();

/// Writes a line about a refusal, unless one was written just now. Each is counted in the metrics.
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

/// Writes a line about a token that has written already, unless one was written just now: its holder writes twice under
/// one token, or a request was repeated.
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

/// Says why, which the client is not told. A storm of one kind hides no other, such as a rotation that went wrong.
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

/// Says who still sends tokens without a signature, where they are accepted.
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

/// What is logged meanwhile in this thread.
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
