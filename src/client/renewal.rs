//! Task that renews a lease.

use std::{io, sync::Arc, time::Duration};

use backon::{BackoffBuilder, ExponentialBuilder};
use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use tokio::time::{Instant, sleep_until, timeout};

use super::{held_lease::HeldLease, loss::Loss};
use crate::lease::{Lease, LeaseError, LeaseId, Leases, Renew};

/// Renews the lease, each time after at most a third of its TTL, until the lease is lost. `granted`
/// is the TTL of the grant, and the time just before its request was sent.
pub(super) async fn renew<L: Leases>(
    leases: Arc<L>,
    held: Arc<HeldLease>,
    id: LeaseId,
    requested_ttl: Duration,
    granted: (Duration, Instant),
) {
    let (mut ttl, mut last_asked_at) = granted;
    let mut renew_at = last_asked_at + ttl / 3;
    let mut pauses = pauses(ttl / 20, ttl / 6);
    // A renewal may be sent while an earlier one is unanswered. A slow response is still accepted,
    // and a request that is never answered does not delay later renewals. A response after the TTL
    // would be useless.
    let mut requests = FuturesUnordered::new();
    let mut last_renewed_at = last_asked_at;
    loop {
        if held.lost().is_some() {
            return;
        }
        tokio::select! {
            biased;
            () = sleep_until(held.ends_at()) => {}
            Some((asked_at, answer)) = requests.next() => match answer {
                Ok(lease) => {
                    let lease: Lease = lease;
                    held.renewed(&lease, asked_at);
                    last_renewed_at = last_renewed_at.max(asked_at);
                    ttl = lease.ttl;
                    // A later request may have failed, and its retry may be due earlier.
                    renew_at = renew_at.min(last_asked_at + ttl / 3);
                    pauses = self::pauses(ttl / 20, ttl / 6);
                }
                Err(LeaseError::Lost { resource }) => {
                    held.lose(Loss::Refused { resource });
                }
                // A later request has succeeded.
                Err(_) if asked_at < last_renewed_at => {}
                Err(error) => {
                    held.failed(error);
                    renew_at = Instant::now() + pauses.next().unwrap_or(ttl / 6);
                }
            },
            () = sleep_until(renew_at) => {
                let asked_at = Instant::now();
                let answer = leases.renew(&held.resource, &id, Renew::new(requested_ttl));
                let answer = timeout(ttl, answer).map(|in_time| in_time.unwrap_or_else(|_| Err(late())));
                requests.push(answer.map(move |answer| (asked_at, answer)));
                last_asked_at = asked_at;
                renew_at = asked_at + interval(ttl);
                if requests.len() > 1 {
                    held.failed(late());
                }
            }
        }
    }
}

/// Returns the time from one renewal to the next. After a pause of the process, the renewals of all
/// its leases are due together. Random intervals spread them again.
fn interval(ttl: Duration) -> Duration {
    (ttl / 3).mul_f64(rand::random_range(0.85..=1.0))
}

/// Returns the error for a renewal without a response in time.
pub(super) fn late() -> LeaseError {
    LeaseError::unavailable(io::Error::from(io::ErrorKind::TimedOut))
}

/// Returns the pauses between retries, which grow exponentially, with full jitter.
pub(super) fn pauses(first: Duration, longest: Duration) -> impl Iterator<Item = Duration> + Send {
    let growing = ExponentialBuilder::new()
        .with_min_delay(first)
        .with_max_delay(longest)
        .without_max_times();
    growing.build().map(|pause| pause.mul_f64(rand::random()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewals_are_spread_within_a_third_of_the_ttl() {
        let ttl = Duration::from_secs(300);
        let intervals: Vec<u64> = (0..400).map(|_| interval(ttl).as_secs()).collect();
        assert!(
            intervals
                .iter()
                .all(|interval| (85..=100).contains(interval))
        );
        assert!(intervals.iter().any(|interval| *interval < 90));
        assert!(intervals.iter().any(|interval| *interval > 95));
    }

    #[test]
    fn pauses_grow_to_their_bound_with_full_jitter() {
        let (first, longest) = (Duration::from_millis(50), Duration::from_secs(2));
        let runs: Vec<Vec<Duration>> = (0..400)
            .map(|_| pauses(first, longest).take(9).collect())
            .collect();
        for step in 0..9 {
            let bound = (first * (1 << step)).min(longest);
            let of_step = || runs.iter().map(|run| run[step]);
            assert!(of_step().all(|pause| pause <= bound), "step {step}");
            // The pauses are spread over the whole range, from zero to the bound.
            assert!(of_step().any(|pause| pause < bound / 10), "step {step}");
            assert!(of_step().any(|pause| pause > bound * 9 / 10), "step {step}");
        }
    }
}
