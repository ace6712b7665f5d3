//! The lock delay: the time for which a resource stays blocked after its lease has expired.

use std::time::Duration;

use tokio::time::sleep;
use tower_fence::lease::{Acquire, Leases, Renew};

use crate::support::{
    lease::{LONG, is_held, is_lost, sku},
    store::TestStore,
};

on_every_store!(
    last_request_under_an_id_sets_the_lock_delay,
    lock_delay_does_not_extend_the_lease,
);

async fn last_request_under_an_id_sets_the_lock_delay<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let lease = one.acquire(&sku(), Acquire::new(LONG)).await.unwrap();
    let again = Acquire::new(S::SHORT).lock_delay(LONG);
    let again = again.lease_id(lease.id.clone());
    two.acquire(&sku(), again).await.unwrap();
    sleep(2 * S::SHORT).await;
    is_lost(one.renew(&sku(), &lease.id, Renew::new(LONG)).await);
    is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
}

/// A client must not assume that it holds the lease during the lock delay.
async fn lock_delay_does_not_extend_the_lease<S: TestStore>() {
    const TTL: Duration = Duration::from_secs(10);
    let (one, two, _db) = S::fresh().await;
    let delayed = Acquire::new(TTL).lock_delay(LONG);
    let lease = one.acquire(&sku(), delayed).await.unwrap();
    assert!(lease.ttl <= TTL, "{lease:?}");
    let held = two.inspect(&sku()).await.unwrap().unwrap();
    assert!(held.ttl <= TTL, "{held:?}");
    for ttl in [TTL, 2 * TTL, TTL] {
        let renewed = one.renew(&sku(), &lease.id, Renew::new(ttl)).await.unwrap();
        assert!(renewed.ttl <= ttl, "{renewed:?}");
    }
}
