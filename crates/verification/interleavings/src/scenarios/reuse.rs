//! Connections that are passed from one write to the next: each waiter gets a connection, and no
//! connection is lost.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use shuttle::{
    future::yield_now,
    rand::{Rng, thread_rng},
};

use super::{FOR_EVER, all, by_chance, some_ms, tasks};
use crate::{
    fence::{conn::Connections, settings::Limits, sql::Names},
    model::{
        clock::{never_stands_still, sleep},
        runtime::Handle,
        sqlx::{Model, Options, Pool},
        step,
        tokio::time::timeout,
    },
};

/// The connections of a fence, and the numbers of those in use.
#[derive(Clone)]
struct Service {
    connections: Arc<Connections<Model>>,
    pool: Pool<Model>,
    in_use: Arc<Mutex<HashSet<u32>>>,
}

/// A mark that a connection is in use.
struct InUse(u32, Arc<Mutex<HashSet<u32>>>);

impl Service {
    /// Creates a service with a pool. Of ten attempts to open a connection, `failures` fail.
    fn new(failures: u32) -> Self {
        let pool = Pool::new(Options {
            connections: thread_rng().gen_range(1..=2),
            acquire_timeout: FOR_EVER,
            failures,
        });
        Self {
            connections: Arc::new(Connections::new(pool.clone(), true, Names)),
            pool,
            in_use: Arc::default(),
        }
    }

    /// Uses a connection for a moment. Returns false if no connection was available within this
    /// time.
    async fn write(&self, pool_timeout: Duration) -> bool {
        // Some connections are dropped in the middle of a statement.
        let whole = thread_rng().gen_bool(0.8);
        self.write_for(pool_timeout, some_ms([0, 5, 12]), whole)
            .await
    }

    async fn write_for(&self, pool_timeout: Duration, time: Duration, whole: bool) -> bool {
        let limits = Limits {
            pool_timeout,
            ..Limits::default()
        };
        let Ok(checked_out) = self.connections.check_out(limits).await else {
            return false;
        };
        let in_use = InUse::new(self, checked_out.number());
        sleep(time).await;
        drop(in_use);
        if whole {
            self.connections.check_in(checked_out, limits);
        }
        true
    }

    /// Uses a connection of the pool, like a task of the application that does not use the fence.
    async fn use_pool(&self) {
        let conn = self.pool.acquire().await.unwrap();
        let in_use = InUse::new(self, conn.number());
        sleep(some_ms([0, 5, 12])).await;
        drop(in_use);
    }
}

impl InUse {
    fn new(service: &Service, number: u32) -> Self {
        let in_use = Arc::clone(&service.in_use);
        assert!(
            in_use.lock().unwrap().insert(number),
            "a connection is used twice"
        );
        Self(number, in_use)
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.1.lock().unwrap().remove(&self.0);
    }
}

/// Runs this number of tasks with one service. Afterwards, all connections are in the pool.
async fn all_use<F: Future<Output = ()> + Send + 'static>(
    service: Service,
    count: usize,
    task: impl Fn(Service, usize) -> F,
) {
    all(tasks(count, |n| task(service.clone(), n))).await;
    service.pool.is_whole().await;
}

/// Each waiter without a timeout gets its turn.
pub async fn every_waiter_gets_a_connection() {
    all_use(Service::new(0), 4, |service, _| async move {
        assert!(service.write(FOR_EVER).await);
        assert!(service.write(FOR_EVER).await);
    })
    .await;
}

/// Some waiters are dropped at any step, or time out. The others get their turn.
pub async fn remaining_waiters_get_a_connection() {
    all_use(Service::new(0), 6, |service, n| async move {
        match n {
            0 | 1 | 2 => assert!(service.write(FOR_EVER).await),
            3 => while service.write(some_ms([1, 5, 12])).await && by_chance() {},
            _ => drop(timeout(some_ms([0, 1, 5, 20]), service.write(FOR_EVER)).await),
        }
    })
    .await;
}

/// Other tasks of the application use connections of the same pool.
pub async fn other_users_have_connections() {
    all_use(Service::new(0), 5, |service, n| async move {
        match n {
            0 | 1 | 2 => assert!(service.write(FOR_EVER).await),
            _ => service.use_pool().await,
        }
    })
    .await;
}

/// Even if there are always further writes, another task of the application gets a connection after
/// a limited number of writes.
pub async fn application_gets_connections() {
    never_stands_still();
    let service = Service::new(0);
    let (done, writes) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let all_tasks = tasks(4, |n| {
        let (service, done, writes) = (service.clone(), done.clone(), writes.clone());
        async move {
            if n == 0 {
                service.use_pool().await;
                done.store(true, SeqCst);
            }
            while !done.load(SeqCst) {
                assert!(
                    service
                        .write_for(FOR_EVER, Duration::from_millis(5), true)
                        .await
                );
                assert!(
                    writes.fetch_add(1, SeqCst) < 60,
                    "the other task gets no connection"
                );
            }
        }
    });
    all(all_tasks).await;
    service.pool.is_whole().await;
}

/// Some connections cannot be opened. A waiter that gets an error retries, and gets a connection.
pub async fn some_connects_fail() {
    all_use(Service::new(4), 4, |service, _| async move {
        while !service.write(FOR_EVER).await {
            yield_now().await;
        }
    })
    .await;
}

/// A runtime ends with all tasks that were spawned from it. The waiters of the other runtime get
/// their turn.
pub async fn another_runtime_ends() {
    let service = Service::new(0);
    let other = Handle::new();
    let others: Vec<_> = (0..3)
        .map(|_| {
            let service = service.clone();
            other.spawn(async move { while service.write(FOR_EVER).await {} })
        })
        .collect();
    let writers = tasks(3, |_| {
        let service = service.clone();
        async move { assert!(service.write(FOR_EVER).await) }
    });
    sleep(some_ms([0, 5, 20, 50])).await;
    other.end();
    all(writers).await;
    service.pool.is_whole().await;
}
