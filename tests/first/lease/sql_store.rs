//! The example of a lease store over one SQL table.

use tower_fence::lease::conformance;

#[allow(dead_code, reason = "its `main`")]
#[path = "../../../examples/sql_store.rs"]
mod example;

#[tokio::test]
async fn the_example_passes_the_public_suite() {
    conformance::run(&example::checked::Table).await;
}
