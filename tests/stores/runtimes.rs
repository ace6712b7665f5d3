//! A store that is used from several runtimes, one of which ends. What serves waiters are tasks, and end with it.

use std::{
    any::Any,
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::Duration,
};

use futures_util::future::join_all;
use sqlx::{Postgres, Sqlite};
use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};
use tower_fence::{
    Resource,
    lease::{Acquire, EtcdLeases, LeaseError, Leases, PostgresLeases},
};

use crate::support::{
    database::TestDatabase,
    etcd::EtcdCluster,
    eventually,
    lease::{LONG, grant, granted, next_grant, sku, wait, waiters},
    store::{Cluster, Etcd, Redis, TestStore},
};

#[test]
fn who_waits_in_redis_is_served_when_another_runtime_ends() {
    who_waits_is_served(of_the_ending_one::<Redis>);
}

#[test]
fn who_waits_in_a_cluster_is_served_when_another_runtime_ends() {
    who_waits_is_served(of_the_ending_one::<Cluster>);
}

#[test]
fn who_waits_in_etcd_is_served_when_another_runtime_ends() {
    who_waits_is_served(of_the_ending_one::<Etcd>);
}

#[test]
fn who_waits_in_postgres_is_served_when_another_runtime_ends() {
    const POOL: u32 = 4;
    who_waits_is_served(|lasting, _| {
        // The pool is the application's, and sqlx does not find out each time that a connection's runtime has ended.
        lasting.block_on(async {
            let db = Postgres::fresh(POOL).await;
            join_all((0..POOL).map(|_| db.pool.acquire())).await;
            let leases = PostgresLeases::new(db.fence()).listen_with(db.url.parse().unwrap());
            (leases, Box::new(db) as _)
        })
    });
}

/// A store whose connections belong to the runtime that ends.
fn of_the_ending_one<S: TestStore>(
    _: &Runtime,
    ending: &Runtime,
) -> (S::Leases, Box<dyn Any + Send>) {
    let (leases, _, db) = ending.block_on(S::fresh());
    (leases, db)
}

fn who_waits_is_served<L: Leases + Clone + 'static>(
    connect: impl Fn(&Runtime, &Runtime) -> (L, Box<dyn Any + Send>),
) {
    let lasting = runtime();
    for is_released in [true, false] {
        let ending = runtime();
        let (leases, db) = connect(&lasting, &ending);
        let ttl = match is_released {
            true => LONG,
            false => Duration::from_secs(3),
        };
        if !is_released {
            // What serves all lines lasts, and what serves a single one ends.
            lasting.block_on(wait_for_another(&leases));
        }
        let held = ending.block_on(grant(&leases, &sku(), ttl));
        let first = ending.block_on(wait(&leases, LONG));
        let waiting = lasting.block_on(wait(&leases, LONG));
        ending.block_on(async {
            first.abort();
            eventually("it has left", async || waiters(&leases).await == 1).await;
        });
        drop(ending);
        lasting.block_on(async {
            if is_released {
                leases.release(&sku(), &held.id).await.unwrap();
            }
            let next = timeout(Duration::from_secs(8), waiting).await;
            let next = match next.expect("nobody tells it").unwrap() {
                Ok(next) => next,
                // It has asked in between, over a connection that was about to end.
                Err(LeaseError::Unavailable(_)) => next_grant(&leases, LONG).await,
                Err(error) => panic!("{error}"),
            };
            assert!(next.token > held.token);
            // Whoever comes later waits as well.
            let waiting = wait(&leases, LONG).await;
            leases.release(&sku(), &next.id).await.unwrap();
            let last = timeout(Duration::from_secs(5), granted(waiting)).await;
            assert!(last.expect("nobody tells it").token > next.token);
            drop((leases, db));
        });
    }
}

/// For whatever resource they are.
#[test]
fn places_in_etcd_are_kept_alive_when_another_runtime_ends() {
    const PLACES: &str = "tower-fence:line:sku-1\0";
    let (lasting, ending) = (runtime(), runtime());
    let (cluster, db, leases) = lasting.block_on(async {
        let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
        // A connection ends with the runtime that has opened it, and whoever watches over it asks again.
        let client = reqwest::Client::builder().pool_max_idle_per_host(0).build();
        let leases = EtcdLeases::builder(db.fence()).client(client.unwrap());
        let leases = leases.connect(&cluster.urls()).await.unwrap();
        (cluster, db, leases)
    });
    // Whoever is the first to wait begins what keeps them.
    ending.block_on(wait_for_another(&leases));
    lasting.block_on(async {
        grant(&leases, &sku(), LONG).await;
        let waiting = wait(&leases, LONG).await;
        ending.shutdown_background();
        let before = AtomicI64::new(i64::MAX);
        eventually("its time begins anew", async || {
            let left = cluster.time_left(PLACES).await;
            let before = before.swap(left, Relaxed);
            assert!(left > 4, "nobody keeps it, and another one is to be taken");
            left > before
        })
        .await;
        waiting.abort();
        drop((leases, db));
    });
}

#[test]
fn what_waited_in_redis_is_gone_though_it_was_dropped_outside_of_a_runtime() {
    what_waited_is_gone(of_the_ending_one::<Redis>);
}

#[test]
fn what_waited_in_etcd_is_gone_though_it_was_dropped_outside_of_a_runtime() {
    what_waited_is_gone(of_the_ending_one::<Etcd>);
}

#[test]
fn what_waited_in_postgres_is_gone_though_it_was_dropped_outside_of_a_runtime() {
    what_waited_is_gone(|runtime, _| {
        let db = runtime.block_on(Postgres::fresh(4));
        let leases = PostgresLeases::new(db.fence()).listen_with(db.url.parse().unwrap());
        (leases, Box::new(db) as _)
    });
}

fn what_waited_is_gone<L: Leases + Clone + 'static>(
    connect: impl Fn(&Runtime, &Runtime) -> (L, Box<dyn Any + Send>),
) {
    let runtime = runtime();
    let (leases, db) = connect(&runtime, &runtime);
    let (store, resource) = (leases.clone(), sku());
    let mut waiting = Box::pin(store.acquire(&resource, Acquire::new(LONG).wait(LONG)));
    runtime.block_on(async {
        grant(&leases, &sku(), LONG).await;
        let in_line = eventually("it is in line", async || waiters(&leases).await == 1);
        tokio::select! {
            early = &mut waiting => panic!("{early:?}"),
            () = in_line => {}
        }
    });
    drop(waiting);
    runtime.block_on(async {
        let left = eventually("it has left", async || waiters(&leases).await == 0);
        // Sooner than by its time.
        timeout(Duration::from_secs(5), left).await.unwrap();
        drop((leases, db));
    });
}

async fn wait_for_another<L: Leases + Clone + 'static>(leases: &L) {
    let other = Resource::new("sku-124").unwrap();
    grant(leases, &other, LONG).await;
    let (waits, asked) = (leases.clone(), other.clone());
    tokio::spawn(async move { waits.acquire(&asked, Acquire::new(LONG).wait(LONG)).await });
    eventually("it is in line", async || {
        let held = leases.inspect(&other).await.unwrap();
        held.is_some_and(|held| held.waiters == 1)
    })
    .await;
}

fn runtime() -> Runtime {
    let mut runtime = Builder::new_multi_thread();
    runtime.worker_threads(2).enable_all().build().unwrap()
}
