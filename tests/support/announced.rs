//! Checks of announced grants after the fence of the resource has admitted a token above the
//! grants. The tests of several stores share these checks.

use sqlx::Sqlite;
use tower_fence::{
    AdmitError, Fence, Resource, Token,
    lease::{Acquire, Announced, LeaseError, Leases, Renew},
};

use crate::{
    database::Fresh,
    fence::use_up,
    lease::{LONG, grant, highest_epoch, sku},
};

/// A resource in the same partition as `sku-1`, which therefore shares its token counter.
pub const NEIGHBOUR: &str = "sku-124";

/// Returns a forged token, which any client can send.
pub fn forged() -> Token {
    Token::new(999_999_999_000_000).unwrap()
}

pub async fn a_forged_token_concerns_its_resource_alone(
    store: impl Leases + Clone,
    db: Fresh<Sqlite>,
) {
    let fence = db.fence();
    let leases = Announced::new(store.clone(), fence.clone());
    let neighbour = Resource::new(NEIGHBOUR).unwrap();
    let before = grant(&leases, &neighbour, LONG).await;
    leases.release(&neighbour, &before.id).await.unwrap();
    use_up(&fence, &sku(), forged()).await.unwrap();

    let lease = grant(&leases, &sku(), LONG).await;
    assert_eq!(lease.token.get(), forged().get() + 1);
    // The lease can be renewed like any other, with and without a new token.
    let plain = leases.renew(&sku(), &lease.id, Renew::new(LONG)).await;
    assert_eq!(plain.unwrap().token, lease.token);
    let renewal = Renew::new(LONG).with_new_token();
    let renewal = leases.renew(&sku(), &lease.id, renewal).await.unwrap();
    assert!(renewal.token > lease.token);
    use_up(&fence, &sku(), renewal.token).await.unwrap();
    leases.release(&sku(), &lease.id).await.unwrap();
    let next = grant(&leases, &sku(), LONG).await;
    assert!(next.token > renewal.token);
    let refused = use_up(&fence, &sku(), renewal.token).await;
    assert_matches!(refused, Err(AdmitError::Stale(_)));
    use_up(&fence, &sku(), next.token).await.unwrap();
    leases.release(&sku(), &next.id).await.unwrap();

    // The forged token has not consumed an epoch. The next token of another resource in the
    // partition follows in the same epoch.
    let after = grant(&leases, &neighbour, LONG).await;
    assert!(after.token > before.token && after.token.get() < before.token.get() + 1_000);
    assert_eq!(highest_epoch(&db).await, 1);

    // After the highest possible token, the resource cannot be leased until its fence is reset.
    use_up(&fence, &sku(), Token::MAX).await.unwrap();
    let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
    assert_matches!(
        refused,
        Err(LeaseError::Exhausted { resource, max_token })
            if resource == sku() && max_token == Token::MAX.get()
    );
    assert!(store.inspect(&sku()).await.unwrap().is_none());
}

/// Checks that a lease with the highest possible token can be used and released, but gets no new
/// token.
pub async fn a_lease_whose_token_is_the_last_has_no_other(
    leases: &impl Leases,
    fence: &Fence<Sqlite>,
) {
    fence.raise(&sku(), Token::MAX).await.unwrap();
    let last = grant(leases, &sku(), LONG).await;
    assert_eq!(last.token, Token::MAX);
    let renewal = Renew::new(LONG).with_new_token();
    let refused = leases.renew(&sku(), &last.id, renewal).await;
    assert_matches!(refused, Err(LeaseError::Exhausted { .. }));
    use_up(fence, &sku(), last.token).await.unwrap();
    leases.release(&sku(), &last.id).await.unwrap();
}
