//! Metrics for operators, through the [`metrics`](https://docs.rs/metrics) facade (feature
//! `metrics`).
//!
//! Install an exporter before the first request, and then call [`register`], so that the counters
//! of the [alerts](crate::deployment#alerts) exist before their first event. The example
//! `inventory` serves `/metrics` for Prometheus. Without the feature, no metrics are recorded.
//! Resource names are never used as labels. The label `problem` is the name of a
//! [`ProblemType`](crate::problem::ProblemType).
//!
//! | metric | meaning | when to investigate |
//! |---|---|---|
//! | `tower_fence_admitted_total{kind}` | requests that were admitted: `write`, or `read` for a fenced read | it stops rising |
//! | `tower_fence_refused_total{problem, reason}` | requests that the layer refused, or whose handler, behind a layer, returned a [`Refusal`](crate::layer::Refusal), a [`DatabaseError`](crate::layer::DatabaseError), a [`WriteError`](crate::fence::WriteError) or a [`NoTransaction`](crate::layer::NoTransaction) other than `NoLayer`; only `stale-token` has a `reason`: `superseded`, `used` (the token was already used for a write) or `floor` (the token is not above the floor of its partition) | `superseded` rises: holders are paused, leases are too short, or the database failed over; `used` rises: holders write twice under one token; `floor`: the database failed over, or rows were removed; `fence-busy`: a contended resource, colliding handlers or a pool that is too small; `store-unavailable`, `outcome-unknown`: a problem of the database |
//! | `tower_fence_missing_layer_total` | writes whose handler needs a fence, but whose route has no layer; the log has the route | it is not 0: add the layer |
//! | `tower_fence_refused_from_memory_total` | stale tokens that were refused according to the cache of the process, without a query | never: these refusals did not load the database |
//! | `tower_fence_unknown_token_keys_total` | tokens that were refused as `forged-token` because their key is unknown to this process | it rises without an attack: a [rotation](crate::token_keys#rotation) reached the issuers first, or an old key was removed too early |
//! | `tower_fence_unsigned_tokens_total` | accepted tokens without a signature, if the layer [still accepts them](crate::layer::Verification::optional) | it does not fall to 0: a client gets its tokens from another issuer |
//! | `tower_fence_replayed_total` | writes whose response came from the record of their idempotency key | it rises: clients do not receive responses |
//! | `tower_fence_commit_failures_total{problem}` | responses that report a transaction that was not committed, or whose outcome is unknown | any `transaction-aborted` or `transaction-escaped`: a bug in a handler |
//! | `tower_fence_admission_seconds` | histogram: time from the end of the body to the admission, a refusal or a replay, or until the client disconnects, including waits for the resource and the pool. A write of a `deferred` layer without an idempotency key is not included: its waits are part of `tower_fence_hold_seconds` | its tail approaches `lock_timeout` or `pool_timeout` |
//! | `tower_fence_hold_seconds` | histogram: time from the admission (in a `deferred` layer, from the start of the handler) to the end of the transaction, or until the handler panics or the client disconnects | its tail approaches `hold_timeout`; other writers wait that long |
//! | `tower_fence_leases_granted_total` | requests for a lease that the issuer has granted, including repeated requests under one lease id | it stops rising |
//! | `tower_fence_grants_superseded_total` | grants whose token was not above the tokens that the resource had received, and that were repeated with a higher token (if a renewal is superseded, the lease is lost instead; leases in Postgres are not counted, because their first grant has a higher token) | it is not 0: the database failed over or `Fence::after_failover` was called (then do not reset the fence), a client sent a forged token or a token of another issuer (then find the sender), a client repeated a request after its token was used, announcements were enabled, or the lease store was changed |
//! | `tower_fence_leases_renewed_total` | leases that the issuer has renewed | it falls while leases are held |
//! | `tower_fence_leases_released_total` | leases that were released | it is far below the grants: holders crash, and waiters wait for the leases to expire |
//! | `tower_fence_leases_broken_total` | leases that an operator has broken | it rises without an action of an operator |
//! | `tower_fence_lease_refused_total{problem, reason}` | requests that the issuer refused; only `lease-lost` has a `reason`: `renewal`, or `end` (a release or a break of a lease that is not held) | `lease-lost` rises with the reason `renewal`: holders renew too late; `store-unavailable`: a problem of Redis, or of the announcement of grants; `fence-exhausted`: a resource has received the highest possible token; `too-many-waiters`: more clients wait than `max_waiters` allows |
//! | `tower_fence_lease_wait_seconds` | histogram: time from a request for a lease to its grant, including the announcement | its tail approaches the timeout of the callers |
//! | `tower_fence_epochs_begun_total` | epochs that have begun, one for each of 256 groups of resources: at the first grant, after a loss of data of the lease store, and after a failover of the database (not for leases in Postgres) | it rises by more than 256 for each of these events |
//! | `tower_fence_quorum_nodes_failed` | gauge: nodes of a [quorum](crate::guide::stores#leases-on-a-quorum) that have failed within the last minute, or have not succeeded since | it is not 0 for minutes: the log names the node and the cause |
//! | `tower_fence_caught_up_total` | resources that were used for the first time since the database was promoted or restored, so that their earlier tokens are stale | it rises without a known failover |
//! | `tower_fence_removed_total{kind}` | rows that [`Fence::maintain`](crate::Fence::maintain) has removed: `keys`, `resources` | it stops rising while the tables grow |
//! | `tower_fence_maintenance_failures_total{kind}` | failed runs of [`Fence::maintain`](crate::Fence::maintain) | it rises: the role lacks a privilege, or the database is unavailable |
//! | `tower_fence_server_connections` | gauge: open connections of the program [`tower-fence`](crate::server) | it approaches the limit |
//! | `tower_fence_server_connections_limit` | gauge: the maximum number of connections of the program: `--max-connections`, or less because of the limit on open files | it is lower than `--max-connections`: raise the limit on open files |
//! | `tower_fence_server_refused_total{problem}` | requests that the program refused before they reached the issuer: `unauthorized`, `operators-only`, `server-busy` and `body-timeout`, and requests in progress at the end of `--drain`. Responses with the status 400, 404 or 405 are not counted | `unauthorized`: a client has no secret, or an old one; `operators-only`: a client with the secret of a holder requests a route of operators; `server-busy`: too many requests |
//! | `tower_fence_leases_held` | gauge: leases that the guards of this process hold | it does not change although work is done |
//! | `tower_fence_leases_lost_total{reason}` | leases that the guards of this process have lost: `refused`, `expired`, `max_hold`, `no_progress`, `superseded` | it is not 0 |

#![cfg_attr(not(feature = "metrics"), allow(unused_variables))]

#[cfg(feature = "_axum")]
use std::time::Duration;

/// Counters of the alerts that have no labels.
#[cfg(feature = "metrics")]
const PLAIN: &[&str] = &[
    "tower_fence_caught_up_total",
    "tower_fence_epochs_begun_total",
    "tower_fence_grants_superseded_total",
    "tower_fence_leases_granted_total",
    "tower_fence_leases_released_total",
    "tower_fence_missing_layer_total",
    "tower_fence_unknown_token_keys_total",
];

/// Counters of the alerts that have one label, and its values.
#[cfg(feature = "metrics")]
const LABELLED: &[(&str, &str, &[&str])] = &[
    (
        "tower_fence_refused_total",
        "problem",
        &[
            "fence-busy",
            "forged-token",
            "handler-timeout",
            "misconfigured",
            "outcome-unknown",
            "response-missing",
            "response-not-stored",
            "rows-unreadable",
            "store-unavailable",
            "transaction-aborted",
            "transaction-escaped",
            "unfenced-write",
            "unknown-epoch",
        ],
    ),
    (
        "tower_fence_lease_refused_total",
        "problem",
        &[
            "fence-exhausted",
            "misconfigured",
            "store-unavailable",
            "too-many-waiters",
        ],
    ),
    (
        "tower_fence_leases_lost_total",
        "reason",
        &[
            "refused",
            "expired",
            "max_hold",
            "no_progress",
            "superseded",
        ],
    ),
    (
        "tower_fence_maintenance_failures_total",
        "kind",
        &["keys", "resources"],
    ),
];

/// Counters of the alerts that have a problem and a reason.
#[cfg(feature = "metrics")]
const WITH_REASON: &[(&str, &str, &str)] = &[
    ("tower_fence_refused_total", "stale-token", "superseded"),
    ("tower_fence_refused_total", "stale-token", "used"),
    ("tower_fence_lease_refused_total", "lease-lost", "renewal"),
];

/// Creates the counters of the [alerts](crate::deployment#alerts), with the value 0.
///
/// Call this function once, after the exporter is installed. Without the call, a counter does not
/// exist before its first event, and `increase` and `rate` in Prometheus miss this event. The
/// counters of the parts of this crate that the process does not use stay 0.
///
/// ```
/// // After `PrometheusBuilder::install_recorder`:
/// tower_fence::metrics::register();
/// ```
#[cfg(feature = "metrics")]
pub fn register() {
    for &name in PLAIN {
        metrics::counter!(name).increment(0);
    }
    for &(name, label, values) in LABELLED {
        for &value in values {
            metrics::counter!(name, label => value).increment(0);
        }
    }
    for &(name, problem, reason) in WITH_REASON {
        metrics::counter!(name, "problem" => problem, "reason" => reason).increment(0);
    }
}

pub(crate) fn count(name: &'static str) {
    #[cfg(feature = "metrics")]
    metrics::counter!(name).increment(1);
}

#[cfg(any(feature = "layer", feature = "client", feature = "_fence"))]
pub(crate) fn count_by(name: &'static str, label: &'static str, value: &'static str) {
    add(name, label, value, 1);
}

/// Changes the number of nodes that have failed. The crate `tower-fence-redlock` uses it.
#[doc(hidden)]
pub fn quorum_nodes_failed(change: f64) {
    #[cfg(feature = "metrics")]
    metrics::gauge!("tower_fence_quorum_nodes_failed").increment(change);
}

#[cfg(any(feature = "layer", feature = "client", feature = "_fence"))]
pub(crate) fn add(name: &'static str, label: &'static str, value: &'static str, count: u64) {
    #[cfg(feature = "metrics")]
    metrics::counter!(name, label => value).increment(count);
}

/// Counts a request that the layer refused, with the reason if the token is stale.
#[cfg(feature = "layer")]
pub(crate) fn refused(problem: &'static str, stale: Option<&'static str>) {
    count_refused("tower_fence_refused_total", problem, stale);
}

/// Counts a request that the issuer refused, with the reason if a lease is not held.
#[cfg(feature = "issuer")]
pub(crate) fn lease_refused(problem: &'static str, lost: Option<&'static str>) {
    count_refused("tower_fence_lease_refused_total", problem, lost);
}

#[cfg(feature = "_axum")]
fn count_refused(name: &'static str, problem: &'static str, reason: Option<&'static str>) {
    #[cfg(feature = "metrics")]
    match reason {
        Some(reason) => metrics::counter!(name, "problem" => problem, "reason" => reason),
        None => metrics::counter!(name, "problem" => problem),
    }
    .increment(1);
}

/// Time since a moment, which is recorded in a histogram when this value is dropped.
#[cfg(feature = "layer")]
pub(crate) struct Timer {
    pub(crate) name: &'static str,
    pub(crate) since: tokio::time::Instant,
}

#[cfg(feature = "layer")]
impl Drop for Timer {
    fn drop(&mut self) {
        took(self.name, self.since.elapsed());
    }
}

#[cfg(feature = "_axum")]
pub(crate) fn took(name: &'static str, time: Duration) {
    #[cfg(feature = "metrics")]
    metrics::histogram!(name).record(time.as_secs_f64());
}

#[cfg(feature = "client")]
pub(crate) fn held(change: f64) {
    #[cfg(feature = "metrics")]
    metrics::gauge!("tower_fence_leases_held").increment(change);
}

#[cfg(all(test, feature = "metrics"))]
mod tests {
    use std::collections::BTreeSet;

    use metrics_exporter_prometheus::PrometheusBuilder;

    /// Returns the counters that the alerts query, without those of the program.
    fn queried() -> BTreeSet<String> {
        let (_, alerts) = include_str!("deployment.md")
            .split_once("\n# Alerts\n")
            .unwrap();
        let (alerts, _) = alerts.split_once("\n# ").unwrap();
        let mut counters = BTreeSet::new();
        for query in alerts.lines().filter_map(|row| row.split(" | ").nth(1)) {
            for (at, _) in query.match_indices("tower_fence_") {
                let rest = &query[at..];
                let end = rest.find(|c: char| c != '_' && !c.is_ascii_lowercase());
                let (name, rest) = rest.split_at(end.unwrap());
                if !name.ends_with("_total") || name.starts_with("tower_fence_server_") {
                    continue;
                }
                let labels = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
                let Some((labels, _)) = labels else {
                    counters.insert(name.to_owned());
                    continue;
                };
                match labels.split_once("=~") {
                    None => _ = counters.insert(format!("{name}{{{labels}}}")),
                    Some((label, values)) => {
                        let values = values.trim_matches('"').split(r"\|");
                        counters
                            .extend(values.map(|value| format!(r#"{name}{{{label}="{value}"}}"#)));
                    }
                }
            }
        }
        counters
    }

    #[test]
    fn each_counter_of_an_alert_is_registered() {
        let recorder = PrometheusBuilder::new().build_recorder();
        ::metrics::with_local_recorder(&recorder, super::register);
        let rendered = recorder.handle().render();
        let registered: BTreeSet<_> = rendered
            .lines()
            .filter_map(|line| line.strip_suffix(" 0"))
            .collect();
        let queried = queried();
        let is_in = |counter: &str, query: &str| {
            let labels = counter.strip_prefix(query);
            labels.is_some_and(|labels| labels.is_empty() || labels.starts_with('{'))
        };
        for query in &queried {
            let found = registered.iter().any(|counter| is_in(counter, query));
            assert!(found, "not registered: {query}");
        }
        for counter in &registered {
            let found = queried.iter().any(|query| is_in(counter, query));
            assert!(found, "without an alert: {counter}");
        }
    }
}
