//! Reports of admissions to the metrics and the console, and of refusals to the log. Clients can
//! cause the lines of the log, so each kind of line is logged at most once per second. The metrics
//! count each refusal.

use std::error::Error;

use crate::{
    chain::Chain, events, fence::Claims, header::FencingToken, metrics, problem::ProblemType,
    sampler::Sampler, stale::StaleToken, token::Resource, token_keys::Forged,
};

// All layers share these samplers, because they write to the same log.
static STALE: Sampler = Sampler::new();
static USED: Sampler = Sampler::new();
static REFUSED_UNSIGNED: Sampler = Sampler::new();
static INCOMPLETE: Sampler = Sampler::new();
static UNKNOWN_KEY: Sampler = Sampler::new();
static WRONG_MAC: Sampler = Sampler::new();
static ACCEPTED_UNSIGNED: Sampler = Sampler::new();
static NO_PRINCIPAL: Sampler = Sampler::new();
static BUSY: Sampler = Sampler::new();
static REFUSED: Sampler = Sampler::new();

/// Reports an admitted request to the metrics (once) and to the console (once for each resource).
pub(super) fn admitted(claims: &Claims, is_read: bool) {
    let kind = if is_read { "read" } else { "write" };
    metrics::count_by("tower_fence_admitted_total", "kind", kind);
    for claim in claims.iter() {
        events::admitted(&claim.resource, claim.token, is_read);
    }
}

/// Logs the refusal of a stale token. If the token was used, either the holder has written twice
/// under one token, or a request was repeated. Used tokens have their own sampler.
pub(super) fn stale(stale: &StaleToken) {
    let (sampler, refused) = match stale.used {
        true => (&USED, "refused a token that was used already"),
        false => (&STALE, "refused a stale writer"),
    };
    if let Some(suppressed) = sampler.next() {
        tracing::warn!(
            problem = ProblemType::StaleToken.name(),
            resource = stale.resource.as_str(),
            presented_token = stale.presented_token.get(),
            max_token = stale.max_token,
            by_floor = stale.by_floor,
            suppressed,
            "{refused}"
        );
    }
}

/// Logs why a token counts as forged, because the response does not contain the reason. Each reason
/// has its own sampler. Many refusals for one reason therefore do not hide the refusals for another
/// reason, such as those after a failed key rotation.
pub(super) fn forged(token: &FencingToken, why: &Forged) {
    let sampler = match why {
        Forged::Unsigned => &REFUSED_UNSIGNED,
        Forged::Incomplete => &INCOMPLETE,
        Forged::UnknownKey(_) => &UNKNOWN_KEY,
        Forged::WrongMac(_) => &WRONG_MAC,
    };
    if let Some(suppressed) = sampler.next() {
        tracing::warn!(
            problem = ProblemType::ForgedToken.name(),
            resource = token.resource.as_ref().map(Resource::as_str),
            presented_token = token.token.get(),
            %why,
            suppressed,
            "refused a token that the issuer has not signed"
        );
    }
}

/// Logs an accepted unsigned token, so that an operator can find its sender.
pub(super) fn unsigned(token: &FencingToken) {
    if let Some(suppressed) = ACCEPTED_UNSIGNED.next() {
        tracing::info!(
            resource = token.resource.as_ref().map(Resource::as_str),
            presented_token = token.token.get(),
            suppressed,
            "accepted a token without a signature"
        );
    }
}

/// Logs a write under an idempotency key whose principal is unknown.
pub(super) fn no_principal() {
    if let Some(suppressed) = NO_PRINCIPAL.next() {
        tracing::error!(
            problem = ProblemType::IdempotencyPrincipalRequired.name(),
            suppressed,
            "the principal of a request with an idempotency key is unknown: identify it with `Idempotency::principal`"
        );
    }
}

/// Logs a write that collided with another transaction, or waited too long for a lock or a
/// connection. The level is WARN, because clients can cause collisions.
pub(super) fn busy(problem: &str, error: &dyn Error, message: &str) {
    if let Some(suppressed) = BUSY.next() {
        tracing::warn!(
            problem,
            error = Chain(error).to_string(),
            suppressed,
            "{message}"
        );
    }
}

/// Logs the refusal of an invalid request, for example one with a malformed token.
pub(super) fn refused(problem: &str, refusal: &dyn Error) {
    if let Some(suppressed) = REFUSED.next() {
        tracing::info!(
            problem,
            error = Chain(refusal).to_string(),
            suppressed,
            "refused a write"
        );
    }
}

/// Runs a function and returns everything that this thread logs during the call, down to INFO.
#[cfg(test)]
pub(crate) fn captured(run: impl FnOnce()) -> String {
    captured_at(tracing::Level::INFO, run)
}

#[cfg(test)]
pub(super) fn captured_at(level: tracing::Level, run: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Log(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

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
        .with_max_level(level)
        .with_writer(move || to_log.clone());
    tracing::subscriber::with_default(subscriber.finish(), run);
    let bytes = log.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

#[cfg(test)]
mod tests {
    use super::captured_at;
    use crate::{Resource, Token, events};

    #[test]
    fn names_in_events_are_quoted_in_a_text_log() {
        let resource = Resource::new("sku-1 token=7").unwrap();
        let logged = captured_at(tracing::Level::TRACE, || {
            events::admitted(&resource, Token::MIN, false);
            events::granted(&resource, Token::MIN, None, None);
            events::lost(&resource);
        });
        let quoted = logged.matches(r#" resource="sku-1 token=7""#);
        assert_eq!(quoted.count(), 3, "{logged}");
    }
}
