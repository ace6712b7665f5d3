//! The public suite of checks, with the stores of the tests.

use std::{any::Any, marker::PhantomData, sync::Mutex, time::Duration};

use tower_fence::lease::conformance::{self, Subject};

use crate::support::store::TestStore;

on_every_store!(store_passes_the_public_suite);

/// A store of the tests, and values that must outlive its leases.
struct Ours<S>(PhantomData<S>, Mutex<Vec<Box<dyn Any + Send>>>);

impl<S: TestStore + Send + Sync> Subject for Ours<S> {
    type Leases = S::Leases;
    const QUEUE: bool = S::HAS_LINE;
    // A busy machine may need longer than the TTL of the other tests between two steps.
    const SHORT: Duration = Duration::from_secs(1);

    async fn fresh(&self) -> (S::Leases, S::Leases) {
        let (one, two, kept) = S::fresh().await;
        self.1.lock().unwrap().push(kept);
        (one, two)
    }

    async fn lose_data(&self, leases: &S::Leases) -> bool {
        S::lose_data(leases).await
    }
}

async fn store_passes_the_public_suite<S: TestStore + Send + Sync>() {
    conformance::run(&Ours::<S>(PhantomData, Mutex::default())).await;
}
