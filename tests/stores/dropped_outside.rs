//! If a request is dropped outside its runtime, a task in that runtime removes the request from the
//! queue.

use std::{any::Any, time::Duration};

use sqlx::Postgres;
use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};
use tower_fence::lease::{Acquire, Leases, PostgresLeases};

use crate::support::{
    database::TestDatabase,
    eventually,
    lease::{LONG, grant, sku, waiters},
    store::{Etcd, Redis, TestStore},
};

#[test]
fn request_in_redis_leaves_the_queue() {
    leaves_the_queue(a_store_of::<Redis>);
}

#[test]
fn request_in_etcd_leaves_the_queue() {
    leaves_the_queue(a_store_of::<Etcd>);
}

#[test]
fn request_in_postgres_leaves_the_queue() {
    leaves_the_queue(|runtime| {
        let db = runtime.block_on(Postgres::fresh(4));
        let leases = PostgresLeases::new(db.fence()).listen_with(db.url.parse().unwrap());
        (leases, Box::new(db) as _)
    });
}

fn a_store_of<S: TestStore>(runtime: &Runtime) -> (S::Leases, Box<dyn Any + Send>) {
    let (leases, _, db) = runtime.block_on(S::fresh());
    (leases, db)
}

fn leaves_the_queue<L: Leases + Clone + 'static>(
    connect: impl Fn(&Runtime) -> (L, Box<dyn Any + Send>),
) {
    let mut runtime = Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
    let (leases, db) = connect(&runtime);
    let (store, resource) = (leases.clone(), sku());
    let mut waiting = Box::pin(store.acquire(&resource, Acquire::new(LONG).wait(LONG)));
    runtime.block_on(async {
        grant(&leases, &sku(), LONG).await;
        let in_queue = eventually("the waiter is in the queue", async || {
            waiters(&leases).await == 1
        });
        tokio::select! {
            early = &mut waiting => panic!("{early:?}"),
            () = in_queue => {}
        }
    });
    drop(waiting);
    runtime.block_on(async {
        let left = eventually("the waiter has left the queue", async || {
            waiters(&leases).await == 0
        });
        // The position would expire only later.
        timeout(Duration::from_secs(5), left).await.unwrap();
        drop((leases, db));
    });
}
