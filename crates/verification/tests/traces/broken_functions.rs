//! SQL functions, each broken by a small change. The traces detect each change.

use super::{broken::Change, fence, fence_floors, fence_real::Functions};
use crate::support::database::read;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traces_of_the_fence_detect_broken_functions() {
    for (function, text, by) in [
        (
            "try_admit",
            "r.max_token < try_admit.token AND r.history = here",
            "r.max_token <= try_admit.token AND r.history = here",
        ),
        ("try_admit", "AND r.history = here", ""),
        (
            "try_admit",
            "ELSE try_admit.token END",
            "ELSE try_admit.token - 1 END",
        ),
        (
            "try_admit",
            "THEN try_admit.token - 1",
            "THEN try_admit.token",
        ),
        (
            "try_raise",
            "r.history = here AND (r.max_token < raised_to",
            "r.history = here AND (r.max_token <> raised_to",
        ),
    ] {
        is_found(function, Change { text, by }, fence::by_functions).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traces_of_floors_detect_broken_functions() {
    let by = "own_partition, here) IS NOT NULL";
    for (function, text) in [
        ("try_admit", "own_partition, here) < try_admit.token"),
        ("try_raise", "own_partition, here) < try_raise.token"),
    ] {
        is_found(function, Change { text, by }, fence_floors::by_functions).await;
    }
}

/// Breaks a function. The traces must detect the change.
async fn is_found(function: &str, change: Change, traces: impl AsyncFn(&Functions)) {
    let functions = Functions::new().await;
    let db = &functions.db;
    let shown = format!("SELECT pg_get_functiondef('tower_fence.{function}'::regproc)");
    let whole: String = read(&db.pool, &shown).await;
    assert_eq!(whole.matches(change.text).count(), 1, "{whole}");
    db.execute(&change.applied(&whole)).await;
    change.is_found(traces(&functions)).await;
}
