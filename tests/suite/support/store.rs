//! The lease stores that the suites run over.

use std::{any::Any, time::Duration};

use axum::Router;
use sqlx::{Postgres as PostgresDatabase, Sqlite, postgres::PgPoolOptions};
use tower_fence::{
    Fence, Resource,
    client::HttpLeases,
    issuer::Issuer,
    lease::{Acquire, EmbeddedLeases, EtcdLeases, Leases, Operate, PostgresLeases, RedisLeases},
};

use super::{
    database::TestDatabase,
    etcd,
    http::Server,
    lease::{LONG, SHORT},
    redis::{fresh_prefix, shared_cluster_url, shared_url},
};

/// A store, and what must not be dropped before it.
pub type Fresh<L> = (L, L, Box<dyn Any + Send>);

pub trait TestStore {
    type Leases: Operate + Clone;

    /// The shortest time to live that is worth a test.
    const SHORT: Duration = SHORT;

    /// A store of its own, seen from two issuers.
    fn fresh() -> impl Future<Output = Fresh<Self::Leases>>;
}

/// The store inside the process.
pub struct Embedded;

impl TestStore for Embedded {
    type Leases = EmbeddedLeases;

    async fn fresh() -> Fresh<EmbeddedLeases> {
        let db = Sqlite::fresh(4).await;
        let leases = EmbeddedLeases::new(db.fence());
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
            let builder = EtcdLeases::builder(db.fence()).key_prefix(&prefix);
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
        let issuer = Issuer::new(EmbeddedLeases::new(db.fence()));
        let issuer = issuer.ttl_limits(Duration::from_millis(1)..=Duration::from_secs(60));
        let server = Server::start(Router::new().nest("/locks", issuer.operator_router())).await;
        let connect = || HttpLeases::new(&server.url("/locks")).unwrap();
        (connect(), connect(), Box::new((db, server)))
    }
}

/// Runs each of these functions, generic over the store, as one test per store.
macro_rules! on_every_store {
    ($($name:ident),* $(,)?) => {
        $crate::support::store::on_every_store!(on_postgres: Postgres, $($name),*);
        $crate::support::store::on_every_store!(on_redis: Redis, $($name),*);
        $crate::support::store::on_every_store!(on_a_cluster: Cluster, $($name),*);
        $crate::support::store::on_every_store!(on_etcd: Etcd, $($name),*);
        $crate::support::store::on_every_store!(embedded: Embedded, $($name),*);
        $crate::support::store::on_every_store!(over_http: Http, $($name),*);
    };
    ($module:ident: $store:ident, $($name:ident),*) => {
        mod $module {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name::<$crate::support::store::$store>().await;
            })*
        }
    };
}

pub(crate) use on_every_store;
