//! An end by force says whether there was something to end.

use tower_fence::lease::{Acquire, Leases, Operate};

use crate::support::{
    lease::{LONG, grant, is_lost, sku},
    store::TestStore,
};

on_every_store!(a_break_tells_whether_the_resource_was_closed);

async fn a_break_tells_whether_the_resource_was_closed<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    assert!(!two.break_lease(&sku()).await.unwrap(), "nobody had it yet");
    let lease = grant(&one, &sku(), LONG).await;
    assert!(two.break_lease(&sku()).await.unwrap());
    assert!(!two.break_lease(&sku()).await.unwrap(), "it has ended");
    is_lost(one.release(&sku(), &lease.id).await);
    let next = two.acquire(&sku(), Acquire::new(LONG)).await.unwrap();
    assert!(next.token > lease.token);
    two.release(&sku(), &next.id).await.unwrap();
    assert!(!one.break_lease(&sku()).await.unwrap(), "it was released");
}
