//! If the fence of a resource has admitted a token above a grant, the epoch of the issuer may have
//! ended. The issuer then reads the epoch from its source again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use sqlx::Sqlite;
use tower_fence::{
    epochs::{Epoch, EpochFuture, Epochs, SourceId},
    lease::{Announced, Leases, RedisLeases},
};
use tower_fence_etcd::EtcdLeasesBuilder;
use tower_fence_redlock::QuorumLeasesBuilder;

use crate::support::{
    database::TestDatabase,
    etcd,
    fence::token,
    lease::{grant_and_release, sku},
    redis::{fresh_prefix, shared_node_urls, shared_url},
};

/// A source that counts the reports of an epoch.
#[derive(Clone, Default)]
struct Source(Arc<AtomicU64>);

impl Epochs for Source {
    fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
        Box::pin(async move { Ok(at_least) })
    }

    fn report_epoch(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
        self.0.fetch_add(1, SeqCst);
        Box::pin(async move { Ok(seen) })
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        Box::pin(async { Ok(SourceId::new("counting").unwrap()) })
    }
}

async fn epoch_is_read_again(store: impl Leases, source: &Source) {
    let db = Sqlite::fresh(2).await;
    let leases = Announced::new(store, db.fence());
    let grant_and_count = async || {
        let lease = grant_and_release(&leases).await;
        (source.0.load(SeqCst), lease.token.get())
    };
    let (before, _) = grant_and_count().await;
    assert_eq!(grant_and_count().await.0, before);
    let higher = token(7_000_000_000);
    db.fence().raise(&sku(), higher).await.unwrap();
    let (after, granted) = grant_and_count().await;
    assert_eq!((after > before, granted), (true, 7_000_000_000));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn higher_token_makes_redis_reread_its_epoch() {
    let source = Source::default();
    let builder = RedisLeases::builder(source.clone()).key_prefix(fresh_prefix());
    let store = builder.connect(&shared_url()).await.unwrap();
    epoch_is_read_again(store, &source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn higher_token_makes_a_quorum_reread_its_epoch() {
    let source = Source::default();
    let urls = shared_node_urls();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let builder = QuorumLeasesBuilder::new(source.clone()).key_prefix(fresh_prefix());
    // On a busy machine an answer may be late.
    let builder = builder.node_timeout(Duration::from_secs(2));
    let store = builder.connect(&urls).await.unwrap();
    epoch_is_read_again(store, &source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn higher_token_makes_etcd_reread_its_epoch() {
    let source = Source::default();
    let builder = EtcdLeasesBuilder::new(source.clone()).key_prefix(fresh_prefix());
    let store = builder.connect(&[etcd::shared_url()]).await.unwrap();
    epoch_is_read_again(store, &source).await;
}
