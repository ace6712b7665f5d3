//! SQL functions, each broken by a small change. The traces detect each change.

use sqlx::{AssertSqlSafe, query_scalar};

use super::{broken::Change, fence, fence_floors, fence_real::Functions};

/// A part of the message with which a trace fails if the database differs from the model. The
/// message lists the steps.
const MESSAGE_PART: &str = "Grant(";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traces_of_the_fence_detect_broken_functions() {
    for (function, change) in [
        (
            "try_admit",
            Change {
                text: "r.max_token < try_admit.token AND r.history = here",
                by: "r.max_token <= try_admit.token AND r.history = here",
            },
        ),
        (
            "try_admit",
            Change {
                text: "AND r.history = here",
                by: "",
            },
        ),
        (
            "try_admit",
            Change {
                text: "ELSE try_admit.token END",
                by: "ELSE try_admit.token - 1 END",
            },
        ),
        (
            "try_admit",
            Change {
                text: "THEN try_admit.token - 1",
                by: "THEN try_admit.token",
            },
        ),
        (
            "try_raise",
            Change {
                text: "r.history = here AND (r.max_token < raised_to",
                by: "r.history = here AND (r.max_token <> raised_to",
            },
        ),
    ] {
        let functions = broken(function, change).await;
        let traces = fence::by_functions(&functions);
        change.is_found(traces, MESSAGE_PART).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traces_of_floors_detect_broken_functions() {
    for (function, change) in [
        (
            "try_admit",
            Change {
                text: "own_partition, here) < try_admit.token",
                by: "own_partition, here) IS NOT NULL",
            },
        ),
        (
            "try_raise",
            Change {
                text: "own_partition, here) < try_raise.token",
                by: "own_partition, here) IS NOT NULL",
            },
        ),
    ] {
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
