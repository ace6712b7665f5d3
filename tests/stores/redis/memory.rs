//! The source of a counter's epochs, and the cached state of issuers: counters of another source,
//! restored counters and leases, and a database that has lost an epoch.

use std::sync::Arc;

use futures_util::future::join_all;
use redis::Value;
use sqlx::Sqlite;
use tokio::sync::Semaphore;
use tower_fence::{
    Fence, Resource,
    epochs::{Epoch, EpochError, EpochFuture, Epochs, SourceId},
    lease::{Acquire, Lease, LeaseError, Leases, RedisLeases, Renew},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    lease::{
        LONG, grant, grant_and_release, highest_epoch, is_lost, is_unavailable, renew_for, sku,
        spawn_acquire,
    },
    redis::{COUNTER, LEASE, RedisServer, dump, restore, with_leases},
    soon,
};

async fn connect(server: &RedisServer, epochs: impl Epochs + 'static) -> RedisLeases {
    RedisLeases::connect(&server.url(), epochs).await.unwrap()
}

/// A source whose answers can be held back, or fail.
#[derive(Clone)]
struct Gated {
    fence: Fence<Sqlite>,
    next: Arc<Semaphore>,
    brings_back: bool,
}

impl Gated {
    fn new(db: &Fresh<Sqlite>) -> Self {
        Self {
            fence: db.fence(),
            next: Arc::new(Semaphore::new(0)),
            brings_back: true,
        }
    }
}

impl Epochs for Gated {
    fn next_epoch(&self, partition: u8, at_least: Epoch) -> EpochFuture<'_> {
        Box::pin(async move {
            let epoch = self.fence.next_epoch(partition, at_least).await;
            self.next.acquire().await.unwrap().forget();
            epoch
        })
    }

    fn report_epoch(&self, partition: u8, seen: Epoch) -> EpochFuture<'_> {
        if self.brings_back {
            return self.fence.report_epoch(partition, seen);
        }
        let cause = std::io::Error::other("down");
        Box::pin(async { Err(EpochError::Unreachable(Box::new(cause))) })
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        self.fence.source_id()
    }
}

#[tokio::test]
async fn counter_of_another_epoch_source_is_refused() {
    let server = RedisServer::start(&[]).await;
    let (ours, theirs) = (Sqlite::fresh(2).await, Sqlite::fresh(2).await);
    let leases = connect(&server, ours.fence()).await;
    let strangers = connect(&server, theirs.fence()).await;
    let first = grant_and_release(&leases).await;
    let unused = Resource::new("sku-2").unwrap();
    for resource in [&sku(), &unused] {
        let refused = strangers.acquire(resource, Acquire::new(LONG)).await;
        let Err(LeaseError::Misconfigured(cause)) = refused else {
            panic!("{refused:?}");
        };
        let text = cause.to_string();
        assert_contains!(text, "`tower-fence`");
        assert_contains!(text, "a key prefix for each database");
        // The error names the keys to delete.
        assert_contains!(text, &COUNTER.replace("110", "N"));
    }
    grant(&leases, &unused, LONG).await;
    let second = grant_and_release(&leases).await;
    assert_eq!(second.token.get(), first.token.get() + 1);
    assert_eq!(highest_epoch(&theirs).await, 0);
    // With a separate key prefix, grants succeed.
    let builder = RedisLeases::builder(theirs.fence()).key_prefix("another");
    let strangers = builder.connect(&server.url()).await.unwrap();
    grant_and_release(&strangers).await;
}

#[tokio::test]
async fn lost_epoch_is_re_reported_to_the_database() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    grant_and_release(&connect(&server, db.fence()).await).await;
    server.command(&["FLUSHALL"]).await;
    grant_and_release(&connect(&server, db.fence()).await).await;
    assert_eq!(highest_epoch(&db).await, 2);
    db.execute("UPDATE tower_fence.epochs SET epoch = 1").await;
    // The issuer continues in the epoch of the counter.
    let last = grant_and_release(&connect(&server, db.fence()).await).await;
    assert_eq!(highest_epoch(&db).await, 2);
    // The counter is lost much later, and another process grants.
    server.command(&["FLUSHALL"]).await;
    let next = grant_and_release(&connect(&server, db.fence()).await).await;
    assert!(next.token > last.token, "{} {}", next.token, last.token);
}

#[tokio::test]
async fn grant_waits_until_its_epoch_is_re_reported() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    grant_and_release(&connect(&server, db.fence()).await).await;
    let mut epochs = Gated::new(&db);
    epochs.brings_back = false;
    let leases = connect(&server, epochs).await;
    is_unavailable(leases.acquire(&sku(), Acquire::new(LONG)).await);
    soon!(
        "the lease is released",
        server.command(&["EXISTS", LEASE]).await == Value::Int(0)
    );
}

#[tokio::test]
async fn counter_rollback_within_one_incarnation_is_detected() {
    let (server, db, leases) = with_leases().await;
    for by_swap in [false, true] {
        grant_and_release(&leases).await;
        let before = highest_epoch(&db).await;
        let copy = dump(&server, &[COUNTER]).await;
        server
            .send(&format!("COPY {COUNTER} {COUNTER} DB 1 REPLACE"))
            .await;
        let last = grant_and_release(&leases).await;
        match by_swap {
            true => drop(server.send("SWAPDB 0 1").await),
            false => restore(&server, &copy).await,
        }
        // Many requests detect the rollback concurrently, and one of them begins an epoch.
        let sku = sku();
        let asking = (0..20).map(|_| leases.acquire(&sku, Acquire::new(LONG)));
        let mut next: Vec<Lease> = join_all(asking).await.into_iter().flatten().collect();
        assert_eq!(next.len(), 1);
        let next = next.remove(0);
        assert!(next.token > last.token, "{} {}", next.token, last.token);
        leases.release(&sku, &next.id).await.unwrap();
        assert_eq!(highest_epoch(&db).await, before + 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_epoch_does_not_begin_on_another_counter() {
    // After PING, the counter still has the epoch of the other issuer.
    for lost in [&["FLUSHALL"][..], &["DEL", COUNTER], &["PING"]] {
        let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
        let epochs = Gated::new(&db);
        let late = connect(&server, epochs.clone()).await;
        let waiting = spawn_acquire(&late, &sku(), Acquire::new(LONG));
        eventually!("it has its epoch", highest_epoch(&db).await == 1);
        let other = connect(&server, db.fence()).await;
        let second = grant_and_release(&other).await;
        assert_eq!(Epoch::of(second.token), Some(Epoch::new(2).unwrap()));
        server.command(lost).await;
        if lost != ["PING"] {
            // A third issuer replaces the counter, and never begins its epoch.
            let blank = connect(&server, Gated::new(&db)).await;
            let _never = spawn_acquire(&blank, &sku(), Acquire::new(LONG));
            eventually!(
                "the counter is replaced",
                server.command(&["EXISTS", COUNTER]).await == redis::Value::Int(1)
            );
        }
        epochs.next.add_permits(10);
        let third = waiting.await.unwrap().unwrap();
        assert!(third.token > second.token, "{third:?} {second:?}");
    }
}

#[tokio::test]
async fn database_behind_the_counter_does_not_lower_the_epoch() {
    let (server, _db, leases) = with_leases().await;
    grant_and_release(&leases).await;
    // The counter is far ahead, and belongs to another incarnation. The database has assigned epoch
    // 1.
    server
        .send(&format!("HSET {COUNTER} epoch 70 history 0"))
        .await;
    let lease = grant(&leases, &sku(), LONG).await;
    assert_eq!(lease.token.get(), 71_000_000_001);
}

#[tokio::test]
async fn lease_of_an_earlier_state_is_lost_and_blocks_acquisition() {
    let (server, _db, leases) = with_leases().await;
    let ended = grant(&leases, &sku(), LONG).await;
    let copy = dump(&server, &[LEASE]).await;
    leases.release(&sku(), &ended.id).await.unwrap();
    server.command(&["FLUSHALL"]).await;
    let last = grant_and_release(&leases).await;
    restore(&server, &copy).await;

    assert_eq!(leases.inspect(&sku()).await.unwrap(), None);
    is_lost(leases.renew(&sku(), &ended.id, Renew::new(LONG)).await);
    let new_token = Renew::new(LONG).with_new_token();
    is_lost(leases.renew(&sku(), &ended.id, new_token).await);
    // The holder of the lease may still use it.
    let other = leases.acquire(&sku(), Acquire::new(LONG)).await;
    assert_matches!(other, Err(LeaseError::Held { .. }));
    // The holder gets a valid token.
    let again = Acquire::new(LONG).lease_id(ended.id.clone());
    let again = leases.acquire(&sku(), again).await.unwrap();
    assert!(again.token > last.token, "{} {}", again.token, last.token);
    renew_for(&leases, &ended, LONG).await;
    // The holder may release the restored lease.
    restore(&server, &copy).await;
    leases.release(&sku(), &ended.id).await.unwrap();
    grant_and_release(&leases).await;
}

#[tokio::test]
async fn lease_above_its_counter_is_ignored() {
    let (server, db, leases) = with_leases().await;
    grant_and_release(&leases).await;
    let copy = dump(&server, &[COUNTER]).await;
    let held = grant(&leases, &sku(), LONG).await;
    restore(&server, &copy).await;
    // This process has no cached state.
    let leases = connect(&server, db.fence()).await;
    is_lost(leases.renew(&sku(), &held.id, Renew::new(LONG)).await);
}

#[tokio::test]
async fn exhausted_epoch_keeps_its_leases_and_missing_counter_loses_them() {
    let (server, _db, leases) = with_leases().await;
    let held = grant(&leases, &sku(), LONG).await;
    server.command(&["HSET", COUNTER, "n", "999999999"]).await;
    assert_eq!(renew_for(&leases, &held, LONG).await.token, held.token);
    let again = Acquire::new(LONG).lease_id(held.id.clone());
    let again = leases.acquire(&sku(), again).await.unwrap();
    assert_eq!(again.token, held.token);
    server.command(&["DEL", COUNTER]).await;
    is_lost(leases.renew(&sku(), &held.id, Renew::new(LONG)).await);
}

/// A token beyond the end of the epoch, or after a restart of the counter within the epoch, might
/// be granted twice, so the renewal is refused.
#[tokio::test]
async fn exhausted_or_lost_counter_gives_no_new_token() {
    let (server, _db, leases) = with_leases().await;
    let used_up = ["HSET", COUNTER, "n", "999999999"];
    let held = grant(&leases, &sku(), LONG).await;
    server.command(&used_up).await;
    let renew = Renew::new(LONG).with_new_token();
    is_lost(leases.renew(&sku(), &held.id, renew).await);
    server.command(&["DEL", LEASE]).await;
    let held = grant(&leases, &sku(), LONG).await;
    assert_eq!(held.token.get(), 2_000_000_001);
    // A repeated request gets a token of the next epoch.
    server.command(&["DEL", COUNTER]).await;
    let again = Acquire::new(LONG).lease_id(held.id);
    let again = leases.acquire(&sku(), again).await.unwrap();
    assert_eq!(again.token.get(), 3_000_000_001);
}
