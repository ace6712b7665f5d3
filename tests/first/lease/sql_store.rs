//! The example of a lease store over one SQL table.

use tower_fence::{
    Token,
    lease::{
        LeaseAdmin, LeaseError, Leases, Renew,
        conformance::{self, Subject},
    },
};

use crate::support::lease::{LONG, grant, sku};

#[allow(dead_code, reason = "its `main`")]
#[path = "../../../examples/sql_store.rs"]
mod example;

/// The highest token stays valid, and no later token is granted.
#[tokio::test]
async fn highest_token_of_the_example_is_kept() {
    let (leases, _) = example::checked::Table.fresh().await;
    let lease = grant(&leases, &sku(), LONG).await;
    let highest = Renew::new(LONG).at_least(Token::MAX);
    leases.renew(&sku(), &lease.id, highest).await.unwrap();
    let new_token = Renew::new(LONG).with_new_token();
    let refused = leases.renew(&sku(), &lease.id, new_token).await;
    assert_matches!(refused, Err(LeaseError::Exhausted { .. }));
    let renewed = leases.renew(&sku(), &lease.id, Renew::new(LONG)).await;
    assert_eq!(renewed.unwrap().token, Token::MAX);
    assert_eq!(leases.list(9, None).await.unwrap().leases.len(), 1);
}

#[tokio::test]
async fn the_example_passes_the_public_suite() {
    conformance::run(&example::checked::Table).await;
}
