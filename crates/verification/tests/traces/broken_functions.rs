//! SQL functions, each broken by a small change. The traces detect each change.

use sqlx::{AssertSqlSafe, query_scalar};

use super::{broken::Change, fence, fence_floors, fence_real::Functions};

/// A part of the message with which a trace fails if the database differs from the model. The
/// message lists the steps.
const MESSAGE_PART: &str = "Grant(";

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
        let change = Change { text, by };
        let functions = broken(function, change).await;
        let traces = fence::by_functions(&functions);
        change.is_found(traces, MESSAGE_PART).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traces_of_floors_detect_broken_functions() {
    for (function, text, by) in [
        (
            "try_admit",
            "own_partition, here) < try_admit.token",
            "own_partition, here) IS NOT NULL",
        ),
        (
            "try_raise",
            "own_partition, here) < try_raise.token",
            "own_partition, here) IS NOT NULL",
        ),
    ] {
        let change = Change { text, by };
        let functions = broken(function, change).await;
        let traces = fence_floors::by_functions(&functions);
        change.is_found(traces, MESSAGE_PART).await;
    }
}

async fn broken(function: &str, change: Change) -> Functions {
    let functions = Functions::new().await;
    let db = &functions.db;
    let shown = format!("SELECT pg_get_functiondef('tower_fence.{function}'::regproc)");
    let shown = query_scalar(AssertSqlSafe(shown)).fetch_one(&db.pool).await;
    let whole: String = shown.unwrap();
    assert_eq!(whole.matches(change.text).count(), 1, "{whole}");
    db.execute(&change.applied(&whole)).await;
    functions
}
