//! Clients that the application has created.

use redis::{
    Client,
    cluster::ClusterClientBuilder,
    sentinel::{SentinelClient, SentinelServerType},
};
use sqlx::Sqlite;
use tower_fence::lease::{LeaseError, Leases, RedisLeases};

use crate::support::{
    database::TestDatabase,
    eventually,
    lease::{LONG, grant, sku, wait},
    redis::{RedisServer, Sentinel, fresh_prefix, shared_cluster_url},
};

/// Grants a lease, and hands it over to a waiting request.
async fn serve(leases: &RedisLeases) {
    let first = grant(leases, &sku(), LONG).await;
    let waiting = wait(leases, LONG).await;
    leases.release(&sku(), &first.id).await.unwrap();
    let second = waiting.await.unwrap().unwrap();
    assert!(second.token > first.token);
}

#[tokio::test]
async fn client_with_a_password_is_used() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let password = ["CONFIG", "SET", "requirepass", "s3cret"];
    server.command(&password).await;
    let url = format!("redis://:s3cret@{}", server.addr());
    let client = Client::open(url).unwrap();
    let leases = RedisLeases::builder(db.fence())
        .with_client(client)
        .unwrap();
    serve(&leases).await;
}

#[tokio::test]
async fn client_of_a_cluster_is_used() {
    let db = Sqlite::fresh(2).await;
    let builder = RedisLeases::builder(db.fence()).key_prefix(fresh_prefix());
    let settings = |client: ClusterClientBuilder| client.connection_concurrency_limit(100);
    serve(
        &builder
            .with_cluster(&[&shared_cluster_url()], settings)
            .unwrap(),
    )
    .await;
}

#[tokio::test]
async fn client_of_sentinels_is_used_with_its_own_database() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let sentinel = Sentinel::start(&server);
    let client = || {
        let master = SentinelServerType::Master;
        SentinelClient::build(vec![sentinel.url()], "the-master".to_owned(), None, master).unwrap()
    };
    let with = |database| {
        let builder = RedisLeases::builder(db.fence());
        builder
            .with_sentinels(client(), database, "the-master")
            .unwrap()
    };
    let leases = with(0);
    eventually("the sentinel answers", async || {
        leases.inspect(&sku()).await.is_ok()
    })
    .await;
    serve(&leases).await;
    let refused = with(1).inspect(&sku()).await;
    assert!(
        matches!(refused, Err(LeaseError::Misconfigured(_))),
        "{refused:?}"
    );
}
