//! A Redis that closes idle connections, and a Redis that is full.

use sqlx::Sqlite;
use tower_fence::lease::{Acquire, Leases};

use crate::support::{
    database::TestDatabase,
    eventually,
    fence::resource,
    lease::{LONG, grant, granted, make_each_call, renew_for, sku, wait},
    redis::{RedisServer, connect},
};

/// Waits until the server has closed every connection except this one.
async fn connections_are_closed(server: &RedisServer) {
    eventually!(
        "idle connections are closed",
        server.info("CLIENT LIST").await.lines().count() == 1
    );
}

#[tokio::test]
async fn every_call_survives_a_closed_idle_connection() {
    let server = RedisServer::start(&["--timeout", "1"]).await;
    let db = Sqlite::fresh(4).await;
    let leases = connect(&server, &db).await;
    make_each_call(&leases, async || connections_are_closed(&server).await).await;
}

#[tokio::test]
async fn a_full_server_renews_and_releases() {
    let server = RedisServer::start(&["--maxmemory-policy", "noeviction"]).await;
    let db = Sqlite::fresh(4).await;
    let leases = connect(&server, &db).await;
    let lease = grant(&leases, &sku(), LONG / 2).await;
    let waiting = wait(&leases, LONG).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let refused = leases.acquire(&resource("other"), Acquire::new(LONG)).await;
    refused.expect_err("a full server granted a lease");
    assert_eq!(renew_for(&leases, &lease, LONG).await.token, lease.token);
    let held = leases.inspect(&sku()).await.unwrap().unwrap();
    assert!(held.ttl > LONG / 2 && held.token == lease.token, "{held:?}");
    // A full server still executes a script that frees memory, so a release makes room for the next
    // waiter.
    leases.release(&sku(), &lease.id).await.unwrap();
    let next = granted(waiting).await;
    assert!(next.token > lease.token);
}
