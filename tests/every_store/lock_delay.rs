//! The lock delay: the time for which a resource stays blocked after its lease has expired.

use tokio::time::sleep;
use tower_fence::lease::{Acquire, Leases, Renew};

use crate::support::{
    lease::{LONG, is_held, is_lost, sku},
    store::TestStore,
};

on_every_store!(
    lock_delay_blocks_the_former_holder_too,
    lock_delay_survives_a_renewal,
    last_request_under_an_id_sets_the_lock_delay,
    lock_delay_does_not_extend_the_lease,
);

/// The former holder may have been paused, so the data that it has read may be out of date.
async fn lock_delay_blocks_the_former_holder_too<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let request = || Acquire::new(S::SHORT).lock_delay(LONG);
    let lease = one.acquire(&sku(), request()).await.unwrap();
    sleep(2 * S::SHORT).await;
    for leases in [&one, &two] {
        let again = request().lease_id(lease.id.clone());
        is_held(leases.acquire(&sku(), again).await);
        is_lost(leases.renew(&sku(), &lease.id, Renew::new(LONG)).await);
        is_lost(leases.release(&sku(), &lease.id).await);
        is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
    }
}

async fn lock_delay_survives_a_renewal<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let delayed = Acquire::new(LONG).lock_delay(LONG);
    let lease = one.acquire(&sku(), delayed).await.unwrap();
    for renew in [Renew::new(S::SHORT).with_new_token(), Renew::new(S::SHORT)] {
        two.renew(&sku(), &lease.id, renew).await.unwrap();
    }
    sleep(2 * S::SHORT).await;
    is_lost(one.renew(&sku(), &lease.id, Renew::new(LONG)).await);
    is_held(two.acquire(&sku(), Acquire::new(LONG)).await);
}

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
    let (one, two, _db) = S::fresh().await;
    let delayed = Acquire::new(S::SHORT).lock_delay(LONG);
    let lease = one.acquire(&sku(), delayed).await.unwrap();
    assert!(lease.ttl <= S::SHORT, "{lease:?}");
    let held = two.inspect(&sku()).await.unwrap().unwrap();
    assert!(held.ttl <= S::SHORT, "{held:?}");
    for ttl in [S::SHORT, 2 * S::SHORT, S::SHORT] {
        let renewed = one.renew(&sku(), &lease.id, Renew::new(ttl)).await.unwrap();
        assert!(renewed.ttl <= ttl, "{renewed:?}");
    }
}
