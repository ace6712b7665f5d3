//! The lock delay: the time for which a resource stays blocked after its lease has expired.

use std::time::Duration;

use tower_fence::lease::{Acquire, Leases, Renew};

use crate::support::{
    lease::{LONG, sku},
    store::TestStore,
};

on_every_store!(lock_delay_does_not_extend_the_lease);

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
