//! The lease stores that the suites run over.

use std::{any::Any, time::Duration};

use axum::Router;
use sqlx::{Postgres as PostgresDatabase, Sqlite, postgres::PgPoolOptions};
use tower_fence::{
    Fence, Resource,
    client::HttpLeases,
    issuer::Issuer,
    lease::{Acquire, Backend, LeaseAdmin, Leases, MemoryLeases, PostgresLeases, RedisLeases},
};
use tower_fence_etcd::{EtcdLeases, EtcdLeasesBuilder};
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use super::{
    database::{Fresh as FreshDatabase, TestDatabase},
    etcd,
    http::Server,
    lease::{LONG, SHORT},
    redis::{delete_keys, fresh_prefix, shared_cluster_url, shared_node_urls, shared_url},
};

/// A store, and what must not be dropped before it.
pub type Fresh<L> = (L, L, Box<dyn Any + Send>);

pub trait TestStore {
    type Leases: LeaseAdmin + Clone;
    /// Whether waiters are counted, and served in the order in which they came.
    const HAS_LINE: bool = true;

    /// The shortest time to live that is worth a test.
    const SHORT: Duration = SHORT;

    /// How many requests may wait, and be served one after the other within a minute on a busy machine.
    const MANY: usize = 1_000;

    /// A store of its own, seen from two issuers.
    fn fresh() -> impl Future<Output = Fresh<Self::Leases>> + Send;

    /// Has the store lose all that it has. False if it never does.
    fn lose_data(leases: &Self::Leases) -> impl Future<Output = bool> + Send {
        let _ = leases;
        async { false }
    }
}

/// The store inside the process.
pub struct Memory;

impl TestStore for Memory {
    type Leases = MemoryLeases;

    async fn fresh() -> Fresh<MemoryLeases> {
        let db = Sqlite::fresh(4).await;
        let leases = MemoryLeases::new(db.fence());
        (leases.clone(), leases, Box::new(db))
    }
}

/// The shared Postgres, from two processes as far as it knows: two pools, two listeners.
pub struct Postgres;

impl TestStore for Postgres {
    type Leases = PostgresLeases;

    async fn fresh() -> Fresh<PostgresLeases> {
        let db = PostgresDatabase::fresh(6).await;
        let other = PgPoolOptions::new().max_connections(6);
        let other = other.connect(&db.url).await.unwrap();
        let (one, two) = (
            // Where a pooler stands in between, no session behind it can listen.
            PostgresLeases::new(db.fence()).listen_with(db.url.parse().unwrap()),
            PostgresLeases::new(Fence::new(other)),
        );
        for leases in [&one, &two] {
            listen(leases).await;
        }
        (one, two, Box::new(db))
    }
}

/// Has a process listen, as it does from its first waiter on. Tests that count on a request being in line within
/// a moment need not count on a new connection within that.
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
        let connect = || async {
            let builder = RedisLeases::builder(db.fence()).key_prefix(&prefix);
            builder.connect(&shared_url()).await.unwrap()
        };
        (connect().await, connect().await, Box::new(db))
    }

    async fn lose_data(leases: &RedisLeases) -> bool {
        delete_keys(
            &shared_url(),
            &format!("{}:*", leases.backend().key_prefix()),
        )
        .await;
        true
    }
}

/// A cluster of one node, talked to as to any cluster.
pub struct Cluster;

impl TestStore for Cluster {
    type Leases = RedisLeases;

    async fn fresh() -> Fresh<RedisLeases> {
        let (db, url) = (Sqlite::fresh(4).await, shared_cluster_url());
        let prefix = fresh_prefix();
        let connect = || async {
            let builder = RedisLeases::builder(db.fence()).key_prefix(&prefix);
            builder.connect_cluster(&[&url]).await.unwrap()
        };
        (connect().await, connect().await, Box::new(db))
    }

    async fn lose_data(leases: &RedisLeases) -> bool {
        delete_keys(
            &shared_cluster_url(),
            &format!("{}:*", leases.backend().key_prefix()),
        )
        .await;
        true
    }
}

/// Three servers that know nothing of each other.
pub struct Quorum;

impl TestStore for Quorum {
    type Leases = QuorumLeases;
    const HAS_LINE: bool = false;

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
    /// Two issuers with the epochs of this database.
    pub async fn of(
        db: FreshDatabase<Sqlite>,
    ) -> (QuorumLeases, QuorumLeases, FreshDatabase<Sqlite>) {
        let (prefix, urls) = (fresh_prefix(), shared_node_urls());
        let connect = || async {
            // Where tests are many, an answer may be late.
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
    const MANY: usize = 300;

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

/// An issuer, over HTTP.
pub struct Http;

impl TestStore for Http {
    type Leases = HttpLeases;

    async fn fresh() -> Fresh<HttpLeases> {
        let db = Sqlite::fresh(4).await;
        let issuer = Issuer::new(MemoryLeases::new(db.fence()));
        let issuer = issuer.ttl_limits(Duration::from_millis(1)..=Duration::from_secs(60));
        let server = Server::start(Router::new().nest("/locks", issuer.operator_router())).await;
        let connect = || HttpLeases::new(&server.url("/locks")).unwrap();
        (connect(), connect(), Box::new((db, server)))
    }
}

/// Runs each of these functions, generic over the store, as one test over this store, in a module of this name.
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
