//! Tests of the first tier, over databases whose fence is distributed.

use std::{path::PathBuf, process::Command};

use crate::support::citus::Cluster;

/// The SQL suite: modules of the first tier that call the functions.
const MODULES: &[&str] = &[
    "contract::admission::",
    "contract::field::",
    "contract::functions::",
    "contract::tokens::",
    "fence::functions::",
    "lease::postgres_functions::",
];

/// The tests that do not apply to a cluster, each with the reason.
const WITHOUT: &[(&str, &str)] = &[
    ("on_sqlite", "another database"),
    (
        "arguments_out_of_range_are_refused",
        "passes null resources",
    ),
    (
        "sql_refusals_have_the_members_of_layer_problems",
        "passes a null resource: Citus 13.2.2 crashes if the distribution argument of a delegated function is null",
    ),
    ("autocommit_admission_logs_a_warning", "calls bypass()"),
    (
        "only_the_claiming_transaction_stores_a_response",
        "passes a resource to admit_once(); scale::distributed passes none",
    ),
    (
        "a_claim_admits_no_token_in_a_transaction_from_before_the_last_write",
        "passes a resource to admit_once(), too",
    ),
    (
        "no_readable_digest_ends_a_lease",
        "calls lease_end() for each row of `resources`, on the workers",
    ),
];

/// Returns the path of the newest build of the first tier's tests, which is in the folder of this
/// program.
fn first_tier() -> PathBuf {
    let folder = std::env::current_exe().unwrap();
    let files = std::fs::read_dir(folder.parent().unwrap())
        .unwrap()
        .flatten();
    files
        .map(|file| file.path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy();
            name.starts_with("first-") && path.extension().is_none()
        })
        .max_by_key(|path| path.metadata().unwrap().modified().unwrap())
        .expect("tests/run has built the first tier")
}

#[tokio::test]
async fn the_sql_suite_passes_on_a_distributed_fence() {
    let listed = Command::new(first_tier()).arg("--list").output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    for (name, _) in WITHOUT {
        assert!(listed.contains(name), "no test is named {name}");
    }
    // Each test joins its own databases to a cluster.
    let cluster = Cluster::apart().await;
    let workers: Vec<_> = cluster
        .workers
        .iter()
        .map(|node| node.url("postgres"))
        .collect();
    let skipped = WITHOUT.iter().flat_map(|(name, _)| ["--skip", *name]);
    let output = Command::new(first_tier())
        .args(MODULES)
        .args(skipped)
        .args(["--test-threads", "3"])
        .env("TEST_DATABASE_URL", cluster.coordinator.url("postgres"))
        .env("TEST_CITUS_WORKERS", workers.join(" "))
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{report}");
    let passed = report
        .lines()
        .filter(|line| line.ends_with("... ok"))
        .count();
    assert!(passed > 25, "{report}");
}
