//! The owner of a lease, which operators can see, after a client has repeated its request.

use std::time::Duration;

use tower_fence::{
    Resource,
    lease::{Acquire, LeaseId, Leases, Owner},
};

use crate::support::store::TestStore;

on_every_store!(
    repeated_request_keeps_the_owner,
    repeated_request_adds_a_missing_owner,
);

const LONG: Duration = Duration::from_secs(60);

fn sku() -> Resource {
    Resource::new("sku-1").unwrap()
}

fn owner(name: &str) -> Option<Owner> {
    Some(Owner::new(name).unwrap())
}

fn request(id: &LeaseId, owner: Option<Owner>) -> Acquire {
    let mut request = Acquire::new(LONG).lease_id(id.clone());
    request.owner = owner;
    request
}

/// Returns the owner that the store reports.
async fn reported_owner<L: Leases>(leases: &L) -> Option<Owner> {
    leases.inspect(&sku()).await.unwrap().unwrap().owner
}

async fn repeated_request_keeps_the_owner<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let id = LeaseId::random();
    let first = request(&id, owner("worker-7"));
    let token = one.acquire(&sku(), first).await.unwrap().token;
    for repeated in [None, owner("worker-8")] {
        let again = two.acquire(&sku(), request(&id, repeated)).await;
        assert_eq!(again.unwrap().token, token);
        assert_eq!(reported_owner(&one).await, owner("worker-7"));
    }
}

async fn repeated_request_adds_a_missing_owner<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let id = LeaseId::random();
    one.acquire(&sku(), request(&id, None)).await.unwrap();
    assert_eq!(reported_owner(&two).await, None);
    let again = request(&id, owner("worker-7"));
    two.acquire(&sku(), again).await.unwrap();
    assert_eq!(reported_owner(&one).await, owner("worker-7"));
}
