//! What operators can see, through the [`metrics`](https://docs.rs/metrics) facade (feature `metrics`).
//!
//! Install any exporter, before the first request; the example `inventory` serves `/metrics` for
//! Prometheus. Without the feature nothing is recorded. Names of resources never become labels;
//! `problem` is the name of a [`ProblemType`](crate::problem::ProblemType).
//!
//! | metric | what | when to worry |
//! |---|---|---|
//! | `tower_fence_admitted_total{kind}` | tokens admitted: `write`, or `read` for a fenced read | it stops |
//! | `tower_fence_refused_total{problem, reason}` | requests that the layer refused; only `stale-token` has a `reason`: `superseded`, `used` (the token has written already) or `floor` (of the partition) | `superseded` rises: holders are paused, or leases too short; `used` rises: holders write twice under one token; `fence-busy`: a hot resource, or a pool that is too small; `store-unavailable`, `outcome-unknown`: the database |
//! | `tower_fence_missing_layer_total` | requests whose handler needs the fence, and whose route has no layer; the log names the route | any: add the layer |
//! | `tower_fence_refused_from_memory_total` | of those, stale tokens that never reached the database | never: it is the storm that was kept away |
//! | `tower_fence_unknown_token_keys_total` | of those refused as `forged-token`, those signed with a key that is not known here | any that is no attack: a [rotation](crate::token_keys#rotation) came to the issuers first, or an old key went too early |
//! | `tower_fence_unsigned_tokens_total` | tokens without a signature that were accepted, where the layer [still does](crate::layer::Verification::optional) | it does not fall to 0: somebody has tokens from elsewhere |
//! | `tower_fence_replayed_total` | writes that were answered from the record of their idempotency key | it rises: clients get no answers |
//! | `tower_fence_commit_failures_total{problem}` | transactions that were not committed although the handler had succeeded | any `transaction-aborted` or `transaction-escaped`: a bug in a handler |
//! | `tower_fence_admission_seconds` | histogram: from the body's end to the admission, a refusal or a replay; waits for the resource and the pool included | its tail nears `lock_wait` or `pool_wait` |
//! | `tower_fence_hold_seconds` | histogram: from the admission to the end of the transaction | its tail nears `hold_timeout`; others wait that long |
//! | `tower_fence_leases_granted_total` | leases that the issuer has granted | it stops |
//! | `tower_fence_grants_outranked_total` | grants that were announced below what the resource had seen, and were granted anew above it (a renewal: lost) | any: somebody sent a token from elsewhere, or a forged one; `Fence::reset` is the cure |
//! | `tower_fence_leases_renewed_total` | leases that the issuer has renewed | it falls while leases are held |
//! | `tower_fence_leases_released_total` | leases that were given back | far fewer than granted: holders die, others wait for the time to run out |
//! | `tower_fence_leases_broken_total` | leases that an operator ended by force | any that nobody remembers |
//! | `tower_fence_lease_refused_total{problem}` | requests that the issuer refused | `lease-lost` rises: holders come too late; `store-unavailable`: Redis, or the announcement of grants |
//! | `tower_fence_lease_wait_seconds` | histogram: from a request for a lease to its grant, announcement included | its tail nears what callers are willing to wait |
//! | `tower_fence_epochs_begun_total` | epochs: Redis has lost its history | more often than Redis restarts or fails over |
//! | `tower_fence_caught_up_total` | resources that were used for the first time since the database was promoted or restored: what was handed out before is dead | it rises, and nobody knows of a failover |
//! | `tower_fence_removed_total{kind}` | rows that [`Fence::maintain`](crate::Fence::maintain) has removed: `keys`, `resources` | it stops while the tables grow |
//! | `tower_fence_maintenance_failures_total{kind}` | turns of that task that failed | it rises: the role lacks a right, or the database is away |
//! | `tower_fence_server_connections` | gauge, of the program [`tower-fence`](crate::server): open connections | it nears `--max-connections` |
//! | `tower_fence_server_refused_total{problem}` | requests that it did not let through to the issuer | `unauthorized`: a client has no secret, or an old one; `server-busy`: too many requests |
//! | `tower_fence_leases_held` | gauge: leases that the guards of this process hold | it stays where work is done |
//! | `tower_fence_leases_lost_total{reason}` | leases that those guards lost: `refused`, `expired`, `outranked` | any |

#![cfg_attr(not(feature = "metrics"), allow(unused_variables))]

#[cfg(feature = "_axum")]
use std::time::Duration;

/// Adds one to a counter without labels.
pub(crate) fn count(name: &'static str) {
    #[cfg(feature = "metrics")]
    metrics::counter!(name).increment(1);
}

/// Adds one to a counter with one label.
#[cfg(any(feature = "_axum", feature = "client", feature = "_fence"))]
pub(crate) fn count_by(name: &'static str, label: &'static str, value: &'static str) {
    #[cfg(feature = "metrics")]
    metrics::counter!(name, label => value).increment(1);
}

/// Adds to a counter with one label.
#[cfg(feature = "_fence")]
pub(crate) fn add(name: &'static str, label: &'static str, value: &'static str, count: u64) {
    #[cfg(feature = "metrics")]
    metrics::counter!(name, label => value).increment(count);
}

/// Counts a request that the layer refused, with the reason if the token is stale.
#[cfg(feature = "layer")]
pub(crate) fn refused(problem: &'static str, stale: Option<&'static str>) {
    #[cfg(feature = "metrics")]
    match stale {
        Some(reason) => {
            metrics::counter!("tower_fence_refused_total", "problem" => problem, "reason" => reason)
        }
        None => metrics::counter!("tower_fence_refused_total", "problem" => problem),
    }
    .increment(1);
}

/// Records how long something took.
#[cfg(feature = "_axum")]
pub(crate) fn took(name: &'static str, time: Duration) {
    #[cfg(feature = "metrics")]
    metrics::histogram!(name).record(time.as_secs_f64());
}

/// Moves the number of leases that are held.
#[cfg(feature = "client")]
pub(crate) fn held(change: f64) {
    #[cfg(feature = "metrics")]
    metrics::gauge!("tower_fence_leases_held").increment(change);
}
