//! `/metrics`: the metrics of the library and of the server, for Prometheus.

use std::time::Duration;

use axum::{
    http::header::CONTENT_TYPE,
    routing::{MethodRouter, get},
};
use metrics_exporter_prometheus::PrometheusBuilder;
use tower_fence::problem::{Problem, ProblemType};

use crate::failure::Failure;

/// The upper bounds of the buckets of all histograms, in seconds.
const BUCKETS: [f64; 12] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0,
];

/// The problems of requests that are refused before they reach the issuer.
const REFUSED: [ProblemType; 4] = [
    ProblemType::Unauthorized,
    ProblemType::OperatorsOnly,
    ProblemType::ServerBusy,
    ProblemType::BodyTimeout,
];

/// Installs the recorder, and returns the route.
pub fn route() -> Result<MethodRouter, Failure> {
    let failed =
        |error: &dyn std::fmt::Display| Failure::other(format!("cannot record metrics: {error}"));
    let builder = PrometheusBuilder::new().set_buckets(&BUCKETS);
    let handle = builder
        .map_err(|error| failed(&error))?
        .install_recorder()
        .map_err(|error| failed(&error))?;
    open_connections(0);
    tower_fence::metrics::register();
    for problem in REFUSED {
        count_refused(problem.name(), 0);
    }
    // Histograms grow until they are drained, even if no client reads the metrics.
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });
    Ok(get(async move || {
        let content_type = [(CONTENT_TYPE, "text/plain; version=0.0.4")];
        (content_type, handle.render())
    }))
}

/// Records the maximum number of connections.
pub fn connections_limit(limit: u32) {
    metrics::gauge!("tower_fence_server_connections_limit").set(limit);
}

/// Records the number of open connections.
pub fn open_connections(count: usize) {
    metrics::gauge!("tower_fence_server_connections").set(count as f64);
}

/// Returns the problem of a request that is refused before it reaches the issuer, and counts it.
pub fn refused(problem: ProblemType) -> Problem {
    count_refused(problem.name(), 1);
    Problem::new(problem)
}

fn count_refused(problem: &'static str, count: u64) {
    metrics::counter!("tower_fence_server_refused_total", "problem" => problem).increment(count);
}
