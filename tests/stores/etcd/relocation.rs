//! A resource moves from one lease store to another while its holders continue: from Redis to etcd,
//! to Postgres, and back. No write of an older holder is admitted after a newer grant was returned.

use std::{
    sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::SeqCst},
    time::Duration,
};

use futures_util::future::join_all;
use sqlx::Postgres;
use tokio::time::sleep;
use tower_fence::{
    AdmitError, Fence, Token, TokenUse,
    lease::{Acquire, BoxLeases, Leases, PostgresLeases, RedisLeases},
};
use tower_fence_etcd::EtcdLeasesBuilder;

use crate::support::{
    database::TestDatabase,
    etcd, eventually,
    lease::sku,
    redis::{fresh_prefix, shared_url},
};

/// The state that the holders share.
struct Load {
    fence: Fence<Postgres>,
    stores: Vec<BoxLeases>,
    /// The store that currently grants.
    current: AtomicUsize,
    /// The highest token that was granted to a holder.
    answered: AtomicI64,
    /// The number of admitted writes with grants of the current store since the last move.
    writes: AtomicUsize,
    /// The number of admitted writes that began after a newer holder was granted a lease.
    late: AtomicUsize,
    /// The number of refused writes.
    refused: AtomicUsize,
    stop: AtomicBool,
}

impl Load {
    /// Acquires from the current store, waits, and writes several times. The holder continues even
    /// if another store becomes the current one.
    async fn hold(&self) {
        while !self.stop.load(SeqCst) {
            let at = self.current.load(SeqCst);
            let before = self.answered.load(SeqCst);
            let request = Acquire::new(Duration::from_secs(2)).wait(Duration::from_secs(1));
            let Ok(lease) = self.stores[at].acquire(&sku(), request).await else {
                continue;
            };
            self.answered.fetch_max(lease.token.get(), SeqCst);
            let is_current = self.current.load(SeqCst) == at;
            let is_higher = lease.token.get() > before;
            assert!(!is_current || is_higher, "{:?} {before}", lease.token);
            // The holder waits before its first write.
            sleep(Duration::from_millis(50)).await;
            for _ in 0..10 {
                sleep(Duration::from_millis(20)).await;
                let newest = self.answered.load(SeqCst);
                if !self.write(lease.token).await {
                    self.refused.fetch_add(1, SeqCst);
                    break;
                }
                let is_late = newest > lease.token.get();
                self.late.fetch_add(usize::from(is_late), SeqCst);
                let is_current = self.current.load(SeqCst) == at;
                self.writes.fetch_add(usize::from(is_current), SeqCst);
            }
            let _ = self.stores[at].release(&sku(), &lease.id).await;
        }
    }

    /// Returns false if the token is stale.
    async fn write(&self, token: Token) -> bool {
        match self.fence.begin(&sku(), token, TokenUse::Reusable).await {
            Ok(tx) => {
                tx.commit().await.unwrap();
                true
            }
            Err(AdmitError::Stale(_)) => false,
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Makes another store the current one, and waits until it is in use.
    async fn move_to(&self, at: usize) {
        self.writes.store(0, SeqCst);
        self.current.store(at, SeqCst);
        eventually!("writes continue", self.writes.load(SeqCst) > 25);
    }
}

/// Moves through these stores while four holders write. Returns the number of late writes, and the
/// number of refused writes.
async fn moved(fence: Fence<Postgres>, stores: Vec<BoxLeases>, moves: &[usize]) -> (usize, usize) {
    let load = Load {
        fence,
        stores,
        current: AtomicUsize::new(0),
        answered: AtomicI64::new(0),
        writes: AtomicUsize::new(0),
        late: AtomicUsize::new(0),
        refused: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
    };
    let moving = async {
        for at in moves {
            load.move_to(*at).await;
        }
        load.stop.store(true, SeqCst);
    };
    tokio::join!(join_all((0..4).map(|_| load.hold())), moving);
    let counts = (load.late.into_inner(), load.refused.into_inner());
    println!("late and refused writes: {counts:?}");
    counts
}

/// Returns Redis, etcd and Postgres. Redis and etcd announce their grants if `announced` is true.
async fn new_stores(fence: &Fence<Postgres>, announced: bool) -> Vec<BoxLeases> {
    let prefix = fresh_prefix();
    let redis = RedisLeases::builder(fence.clone()).key_prefix(&prefix);
    let redis = redis.connect(&shared_url()).await.unwrap();
    let etcd = EtcdLeasesBuilder::new(fence.clone()).key_prefix(&prefix);
    let etcd = etcd.connect(&[etcd::shared_url()]).await.unwrap();
    let postgres = BoxLeases::new(PostgresLeases::new(fence.clone()));
    match announced {
        true => vec![
            BoxLeases::new(redis.announced_to(fence.clone())),
            BoxLeases::new(etcd.announced_to(fence.clone())),
            postgres,
        ],
        false => vec![BoxLeases::new(redis), BoxLeases::new(etcd), postgres],
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holders_survive_moves_between_stores_and_back() {
    let db = Postgres::fresh(12).await;
    let stores = new_stores(&db.fence(), true).await;
    let moves = [0, 1, 2, 0, 1, 0, 2, 1, 0];
    let (late, refused) = moved(db.fence(), stores, &moves).await;
    assert_eq!(late, 0);
    assert!(refused > 0, "no holder was active during a move");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_announcements_an_older_holder_writes_after_a_move() {
    let db = Postgres::fresh(12).await;
    let mut stores = vec![];
    for _ in 0..6 {
        let two = new_stores(&db.fence(), false).await.into_iter().take(2);
        stores.extend(two);
    }
    // Each move leads to a store that has no epoch yet and therefore begins one. A move back to an
    // earlier store would work only if grants were announced to the fence.
    let moves: Vec<usize> = (0..stores.len()).collect();
    let (late, _) = moved(db.fence(), stores, &moves).await;
    assert!(late > 0, "the load does not detect late writes");
}
