//! Databases, servers and clients for the tests.

/// Checks that a value matches a pattern, like the standard library's unstable macro of this name.
#[macro_export]
macro_rules! assert_matches {
    ($value:expr, $pattern:pat $(if $guard:expr)? $(,)?) => {
        match $value {
            $pattern $(if $guard)? => {}
            ref other => panic!("{other:?} does not match {}", stringify!($pattern)),
        }
    };
}

/// Checks that a text contains a part, and shows both otherwise.
#[macro_export]
macro_rules! assert_contains {
    ($text:expr, $part:expr $(,)?) => {
        match (&$text, $part) {
            (text, part) => assert!(text.contains(part), "{part:?} is not in {text}"),
        }
    };
}

/// Calls the function [`eventually`] with a condition that is an expression.
#[macro_export]
macro_rules! eventually {
    ($what:expr, $holds:expr $(,)?) => {
        $crate::eventually($what, async || $holds).await
    };
}

/// Calls the function [`soon`] with a condition that is an expression.
#[macro_export]
macro_rules! soon {
    ($what:expr, $holds:expr $(,)?) => {
        $crate::soon($what, async || $holds).await
    };
}

pub mod announced;
pub mod certificates;
pub mod citus;
pub mod clock;
pub mod cluster;
pub mod database;
pub mod disconnect;
pub mod epochs;
pub mod etcd;
pub mod fence;
pub mod functions;
pub mod http;
pub mod lease;
pub mod lock_servers;
pub mod log;
pub mod nodes;
pub mod pgbouncer;
pub mod ports;
pub mod postgres;
pub mod process;
pub mod proxy;
pub mod redis;
pub mod standby;
pub mod store;
pub mod template;
pub mod wall_clock;

use std::{path::Path, time::Duration};

/// The timeout of [`eventually`] and similar waits. It is long, because a busy machine is slow.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The timeout of [`soon`]. Leases and waits whose end is tested last at least three times as long.
pub const SOON: Duration = Duration::from_secs(10);

/// Waits until `condition` holds. Panics after [`PATIENCE`].
///
/// A lease with a TTL of up to [`PATIENCE`] expires during this wait. [`soon`] waits for an event
/// that must precede the expiry.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !condition().await {
        assert!(
            tokio::time::Instant::now() < deadline,
            "never happened: {what}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until `condition` holds. Panics after [`SOON`].
///
/// A test that waits for a release needs this short timeout, because the expiry of the lease would
/// satisfy the condition as well.
pub async fn soon(what: &str, condition: impl AsyncFnMut() -> bool) {
    let happened = tokio::time::timeout(SOON, eventually(what, condition)).await;
    assert!(happened.is_ok(), "did not happen within {SOON:?}: {what}");
}

/// Returns the root folder of the repository.
pub fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Returns the version of the library.
pub fn version() -> &'static str {
    let manifest = include_str!("../../Cargo.toml");
    let version = manifest
        .lines()
        .find_map(|line| line.strip_prefix("version = "));
    version
        .expect("Cargo.toml has no version")
        .trim_matches('"')
}

/// Returns an environment variable that `tests/run` sets.
pub fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: use tests/run"))
}
