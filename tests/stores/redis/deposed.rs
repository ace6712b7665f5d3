//! A master that was replaced, and still answers on its open connections.

use sqlx::Sqlite;
use tokio::sync::Mutex;
use tower_fence::lease::{Acquire, LeaseError, Leases, RedisLeases, Renew};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    lease::{LONG, grant, granted_within, sku, wait},
    proxy::Proxy,
    redis::RedisServer,
};

/// Returns a client that reaches a server through a proxy.
async fn client_of(server: &RedisServer, db: &Fresh<Sqlite>) -> (RedisLeases, Proxy) {
    let proxy = Proxy::to(server.addr()).await;
    let url = format!("redis://{}", proxy.addr);
    let leases = RedisLeases::connect(&url, db.fence()).await.unwrap();
    (leases, proxy)
}

#[tokio::test]
async fn connection_to_a_replaced_master_is_not_reused() {
    let db = Sqlite::fresh(2).await;
    let (old, new) = (RedisServer::start(&[]).await, RedisServer::start(&[]).await);
    let (leases, proxy) = client_of(&old, &db).await;
    let first = grant(&leases, &sku(), LONG).await;

    let follow = format!("REPLICAOF 127.0.0.1 {}", new.addr().port());
    old.send(&follow).await;
    proxy.switch_new_to(new.addr());
    // Until the old master has the data of the new one, it can answer that the lease is held,
    // because this answer needs no write.
    let next = Mutex::new(None);
    eventually("the new master is found", async || {
        let granted = leases.acquire(&sku(), Acquire::new(LONG)).await;
        let is_held = matches!(granted, Err(LeaseError::Held { .. }));
        assert!(granted.is_ok() || is_held, "{granted:?}");
        *next.lock().await = granted.ok();
        next.lock().await.is_some()
    })
    .await;
    let next = next.into_inner().unwrap();
    assert!(next.token > first.token);
    let held = leases.inspect(&sku()).await.unwrap();
    assert_eq!(held.unwrap().token, next.token);
}

/// Both masters have the lease, because the client has requested the same lease id again at the new
/// master.
#[tokio::test]
async fn renewal_at_a_replaced_master_finds_the_new_one() {
    let db = Sqlite::fresh(2).await;
    let (old, new) = (RedisServer::start(&[]).await, RedisServer::start(&[]).await);
    let (leases, proxy) = client_of(&old, &db).await;
    let first = grant(&leases, &sku(), LONG).await;
    let move_to = async |from: &RedisServer, to: &RedisServer| {
        proxy.switch_new_to(to.addr());
        from.send("CLIENT KILL TYPE normal").await;
    };

    move_to(&old, &new).await;
    let next = Mutex::new(None);
    eventually("the new master grants", async || {
        let again = Acquire::new(LONG).lease_id(first.id.clone());
        *next.lock().await = leases.acquire(&sku(), again).await.ok();
        next.lock().await.is_some()
    })
    .await;
    let next = next.into_inner().unwrap();
    assert!(next.token > first.token);

    move_to(&new, &old).await;
    eventually!(
        "the old master receives the request",
        matches!(leases.inspect(&sku()).await, Ok(None))
    );
    proxy.switch_new_to(new.addr());
    let renewed = leases.renew(&sku(), &first.id, Renew::new(LONG)).await;
    assert_eq!(renewed.unwrap().token, next.token);
}

/// The connection that receives grants still leads to the old master.
#[tokio::test]
async fn waiter_at_a_replaced_master_is_served_after_discovery() {
    let db = Sqlite::fresh(2).await;
    let (old, new) = (RedisServer::start(&[]).await, RedisServer::start(&[]).await);
    let (leases, proxy) = client_of(&old, &db).await;
    grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, LONG).await;

    proxy.switch_new_to(new.addr());
    old.send("CLIENT KILL TYPE normal").await;
    eventually!(
        "the new master answers",
        leases.inspect(&sku()).await.is_ok()
    );
    granted_within(6, waiting).await;
}
