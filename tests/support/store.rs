//! The lease stores that the suites use.

use std::{any::Any, time::Duration};

use axum::Router;
use sqlx::{Postgres as PostgresDatabase, Sqlite};
use tower_fence::{
    Fence, Resource,
    client::HttpLeases,
    issuer::Issuer,
    lease::{Acquire, Backend, LeaseAdmin, Leases, MemoryLeases, PostgresLeases, RedisLeases},
};
use tower_fence_etcd::{EtcdLeases, EtcdLeasesBuilder};
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use super::{
    database::{Fresh as FreshDatabase, TestDatabase, pool_of},
    etcd,
    http::Server,
    lease::{LONG, SHORT},
    redis::{
        connect_shared, delete_keys, fresh_prefix, shared_cluster_url, shared_node_urls, shared_url,
    },
};

/// Two issuers on one store, and a value that must outlive both.
pub type Fresh<L> = (L, L, Box<dyn Any + Send>);

pub trait TestStore {
    type Leases: LeaseAdmin + Clone;
    /// Whether waiters are counted and served in order of arrival.
    const HAS_LINE: bool = true;

    /// Whether the store records the time of each grant.
    const HAS_GRANT_TIME: bool = true;

    /// The shortest TTL that the tests use.
    const SHORT: Duration = SHORT;

    /// Creates a store for one test, with two issuers.
    fn fresh() -> impl Future<Output = Fresh<Self::Leases>> + Send;

    /// Deletes all data of the store. Returns false if the store cannot lose data.
    fn lose_data(leases: &Self::Leases) -> impl Future<Output = bool> + Send {
        let _ = leases;
        async { false }
    }
}

/// The store in the memory of the process.
pub struct Memory;

impl TestStore for Memory {
    type Leases = MemoryLeases;

    async fn fresh() -> Fresh<MemoryLeases> {
        let db = Sqlite::fresh(4).await;
        let leases = MemoryLeases::new(db.fence());
        (leases.clone(), leases, Box::new(db))
    }
}

/// The shared Postgres. The two issuers have separate pools and listeners, like two processes.
pub struct Postgres;

impl TestStore for Postgres {
    type Leases = PostgresLeases;

    async fn fresh() -> Fresh<PostgresLeases> {
        let db = PostgresDatabase::fresh(6).await;
        let other = pool_of(&db.url, 6).await;
        let (one, two) = (
            // A session behind a pooler cannot listen, so the listener connects directly.
            PostgresLeases::new(db.fence()).listen_with(db.url.parse().unwrap()),
            PostgresLeases::new(Fence::new(other)),
        );
        for leases in [&one, &two] {
            listen(leases).await;
        }
        (one, two, Box::new(db))
    }
}

/// Makes an issuer open its listener now. Otherwise the issuer opens its listener for its first
/// waiter, and that waiter joins the queue only after the connection is established.
pub async fn listen(leases: &PostgresLeases) {
    let resource = Resource::new("somebody waits for this").unwrap();
    let held = leases.acquire(&resource, Acquire::new(LONG)).await.unwrap();
    let wait = Acquire::new(LONG).wait(SHORT);
    leases.acquire(&resource, wait).await.unwrap_err();
    leases.release(&resource, &held.id).await.unwrap();
}

/// The shared Redis.
pub struct Redis;

impl TestStore for Redis {
    type Leases = RedisLeases;

    async fn fresh() -> Fresh<RedisLeases> {
        let db = Sqlite::fresh(4).await;
        let prefix = fresh_prefix();
        let connect = || connect_shared(db.fence(), &prefix);
        (connect().await, connect().await, Box::new(db))
    }

    async fn lose_data(leases: &RedisLeases) -> bool {
        let pattern = format!("{}:*", leases.backend().key_prefix());
        delete_keys(&shared_url(), &pattern).await;
        true
    }
}

/// The shared Redis Cluster, which has one node.
pub struct Cluster;

impl TestStore for Cluster {
    type Leases = RedisLeases;

    async fn fresh() -> Fresh<RedisLeases> {
        let (db, url) = (Sqlite::fresh(4).await, shared_cluster_url());
        let prefix = fresh_prefix();
        let connect = || async {
            let builder = RedisLeases::builder(db.fence()).key_prefix(&prefix);
            builder.with_cluster(&[&url], |client| client).unwrap()
        };
        (connect().await, connect().await, Box::new(db))
    }

    async fn lose_data(leases: &RedisLeases) -> bool {
        let pattern = format!("{}:*", leases.backend().key_prefix());
        delete_keys(&shared_cluster_url(), &pattern).await;
        true
    }
}

/// A quorum of three independent shared Redis servers.
pub struct Quorum;

impl TestStore for Quorum {
    type Leases = QuorumLeases;
    const HAS_LINE: bool = false;
    const HAS_GRANT_TIME: bool = false;

    async fn fresh() -> Fresh<QuorumLeases> {
        let (one, two, db) = Self::of(Sqlite::fresh(4).await).await;
        (one, two, Box::new(db))
    }

    async fn lose_data(leases: &QuorumLeases) -> bool {
        let pattern = format!("{}:*", leases.backend().key_prefix());
        for url in shared_node_urls() {
            delete_keys(&url, &pattern).await;
        }
        true
    }
}

impl Quorum {
    /// Creates two issuers with the epochs of this database.
    pub async fn of(
        db: FreshDatabase<Sqlite>,
    ) -> (QuorumLeases, QuorumLeases, FreshDatabase<Sqlite>) {
        let (prefix, urls) = (fresh_prefix(), shared_node_urls());
        let connect = || async {
            // A busy machine may answer late.
            let builder = QuorumLeasesBuilder::new(db.fence()).key_prefix(&prefix);
            let builder = builder.node_timeout(Duration::from_secs(2));
            let urls: Vec<_> = urls.iter().map(String::as_str).collect();
            builder.connect(&urls).await.unwrap()
        };
        (connect().await, connect().await, db)
    }
}

/// The shared etcd.
pub struct Etcd;

impl TestStore for Etcd {
    type Leases = EtcdLeases;

    const SHORT: Duration = Duration::from_secs(1);

    async fn fresh() -> Fresh<EtcdLeases> {
        let db = Sqlite::fresh(4).await;
        let prefix = fresh_prefix();
        let connect = || async {
            let builder = EtcdLeasesBuilder::new(db.fence()).key_prefix(&prefix);
            builder.connect(&[etcd::shared_url()]).await.unwrap()
        };
        (connect().await, connect().await, Box::new(db))
    }
}

/// An issuer that is used over HTTP.
pub struct Http;

impl TestStore for Http {
    type Leases = HttpLeases;

    async fn fresh() -> Fresh<HttpLeases> {
        let db = Sqlite::fresh(4).await;
        let issuer = Issuer::new(MemoryLeases::new(db.fence()));
        let longest = 10 * LONG;
        let issuer = issuer.ttl_limits(Duration::from_millis(1)..=longest);
        let issuer = issuer.wait_limit(longest);
        let server = Server::start(Router::new().nest("/locks", issuer.operator_router())).await;
        let connect = || HttpLeases::new(&server.url("/locks")).unwrap();
        (connect(), connect(), Box::new((db, server)))
    }
}

/// Defines a module that runs each of these functions as a test with this store.
#[macro_export]
macro_rules! on_store {
    ($module:ident: $store:ident, $($name:ident),* $(,)?) => {
        mod $module {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name::<$crate::store::$store>().await;
            })*
        }
    };
}

pub use crate::on_store;
