//! Functions that are broken, each by a few letters: the same traces find each of them.

use sqlx::{AssertSqlSafe, query_scalar};

use super::{broken::Change, fence, fence_floors, fence_real::Functions};

struct Broken {
    function: &'static str,
    text: &'static str,
    by: &'static str,
}

/// What a trace says that was left by the model: what was done by then.
const TOLD: &str = "Grant(";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn are_found_by_the_traces_of_the_fence() {
    for broken in [
        Broken {
            function: "fence_admit",
            text: "f.max_token < fence_admit.token\n            AND f.history",
            by: "f.max_token <= fence_admit.token\n            AND f.history",
        },
        Broken {
            function: "fence_admit",
            text: "AND f.history = fence_history()",
            by: "",
        },
        Broken {
            function: "fence_admit",
            text: "ELSE fence_admit.token END",
            by: "ELSE fence_admit.token - 1 END",
        },
        Broken {
            function: "fence_raise",
            text: "f.max_token < dead AND f.history = fence_history()",
            by: "f.max_token <> dead AND f.history = fence_history()",
        },
    ] {
        let functions = broken.functions().await;
        broken.is_found(fence::by_functions(&functions)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn are_found_by_the_traces_of_floors() {
    for broken in [
        Broken {
            function: "fence_admit",
            text: "WHERE fence_admit.token > s.floor",
            by: "",
        },
        Broken {
            function: "fence_raise",
            text: "WHERE fence_raise.token > s.floor",
            by: "",
        },
    ] {
        let functions = broken.functions().await;
        broken
            .is_found(fence_floors::by_functions(&functions))
            .await;
    }
}

impl Broken {
    async fn functions(&self) -> Functions {
        let functions = Functions::new().await;
        let (db, name) = (&functions.db, self.function);
        let shown = format!("SELECT pg_get_functiondef('{name}'::regproc)");
        let shown = query_scalar(AssertSqlSafe(shown)).fetch_one(&db.pool).await;
        let whole: String = shown.unwrap();
        assert_eq!(whole.matches(self.text).count(), 1, "{whole}");
        db.execute(&self.change().applied(&whole)).await;
        functions
    }

    async fn is_found(&self, traces: impl Future<Output = ()>) {
        self.change().is_found(traces, TOLD).await;
    }

    const fn change(&self) -> Change {
        let Self { text, by, .. } = *self;
        Change { text, by }
    }
}
