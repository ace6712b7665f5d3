//! Functions that are broken, each by a few letters: the same traces find each of them.

use sqlx::{AssertSqlSafe, query_scalar};

use super::{broken::Change, fence, fence_floors, fence_real::Functions};

/// What a trace says that was left by the model: what was done by then.
const TOLD: &str = "Grant(";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn are_found_by_the_traces_of_the_fence() {
    for (function, change) in [
        (
            "fence_admit",
            Change {
                text: "f.max_token < fence_admit.token\n            AND f.history",
                by: "f.max_token <= fence_admit.token\n            AND f.history",
            },
        ),
        (
            "fence_admit",
            Change {
                text: "AND f.history = fence_history()",
                by: "",
            },
        ),
        (
            "fence_admit",
            Change {
                text: "ELSE fence_admit.token END",
                by: "ELSE fence_admit.token - 1 END",
            },
        ),
        (
            "fence_raise",
            Change {
                text: "f.max_token < dead AND f.history = fence_history()",
                by: "f.max_token <> dead AND f.history = fence_history()",
            },
        ),
    ] {
        let functions = broken(function, change).await;
        let traces = fence::by_functions(&functions);
        change.is_found(traces, TOLD).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn are_found_by_the_traces_of_floors() {
    for (function, change) in [
        (
            "fence_admit",
            Change {
                text: "WHERE fence_admit.token > s.floor",
                by: "",
            },
        ),
        (
            "fence_raise",
            Change {
                text: "WHERE fence_raise.token > s.floor",
                by: "",
            },
        ),
    ] {
        let functions = broken(function, change).await;
        let traces = fence_floors::by_functions(&functions);
        change.is_found(traces, TOLD).await;
    }
}

async fn broken(function: &str, change: Change) -> Functions {
    let functions = Functions::new().await;
    let db = &functions.db;
    let shown = format!("SELECT pg_get_functiondef('{function}'::regproc)");
    let shown = query_scalar(AssertSqlSafe(shown)).fetch_one(&db.pool).await;
    let whole: String = shown.unwrap();
    assert_eq!(whole.matches(change.text).count(), 1, "{whole}");
    db.execute(&change.applied(&whole)).await;
    functions
}
