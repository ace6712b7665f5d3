//! When a quorum takes an epoch from the database, and when it continues without the database.

use std::time::Duration;

use futures_util::future::join_all;
use sqlx::Sqlite;
use tower_fence::{
    Resource,
    epochs::{Epoch, Epochs},
    lease::{Acquire, Lease, Leases, Renew},
};
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use crate::support::{
    database::{Fresh, TestDatabase},
    epochs::Away,
    eventually,
    lease::{
        LONG, grant, grant_and_release, highest_epoch, is_lost, is_unavailable, keeps_its_token,
        sku,
    },
    redis::{RedisServer, fresh_prefix},
};

/// Resources in the partition of `sku-1`.
const NEIGHBOURS: [&str; 5] = ["sku-124", "sku-378", "sku-456", "sku-821", "sku-1047"];

pub struct Site {
    pub db: Fresh<Sqlite>,
    pub nodes: Vec<RedisServer>,
    prefix: String,
}

impl Site {
    pub async fn new() -> Self {
        Self {
            db: Sqlite::fresh(4).await,
            nodes: join_all((0..3).map(|_| RedisServer::start(&[]))).await,
            prefix: fresh_prefix(),
        }
    }

    /// Returns an issuer without any cached state.
    pub async fn issuer(&self) -> QuorumLeases {
        self.issuer_with(self.db.fence()).await
    }

    pub async fn issuer_with(&self, epochs: impl Epochs + 'static) -> QuorumLeases {
        let urls: Vec<_> = self.nodes.iter().map(RedisServer::url).collect();
        let urls: Vec<_> = urls.iter().map(String::as_str).collect();
        let builder = QuorumLeasesBuilder::new(epochs).key_prefix(&self.prefix);
        let builder = builder.node_timeout(Duration::from_secs(2));
        builder.connect(&urls).await.unwrap()
    }

    /// Returns a resource in the same partition.
    pub fn neighbour(&self) -> Resource {
        Resource::new(NEIGHBOURS[0]).unwrap()
    }

    /// Returns the key of the lease.
    pub fn lease(&self) -> String {
        format!("{}:quorum:{{110}}:lease:sku-1", self.prefix)
    }

    /// Returns the key of the token counter.
    pub fn counter(&self) -> String {
        format!("{}:quorum:{{110}}:counter", self.prefix)
    }

    async fn set_counters(&self, n: i64) {
        for node in &self.nodes {
            node.send(&format!("HSET {} n {n}", self.counter())).await;
        }
    }

    async fn restart_empty(&mut self, node: usize) {
        self.nodes[node].kill();
        self.nodes[node].start_again().await;
    }
}

fn epoch(lease: &Lease) -> i64 {
    lease.token.get() / Epoch::SIZE
}

#[tokio::test]
async fn concurrent_requests_share_a_new_epoch() {
    let site = Site::new().await;
    let leases = site.issuer().await;
    let resources = NEIGHBOURS.map(|name| Resource::new(name).unwrap());
    let granting = resources
        .iter()
        .map(|resource| grant(&leases, resource, LONG));
    let granted = join_all(granting).await;
    assert!(granted.iter().all(|lease| epoch(lease) == 1), "{granted:?}");
    assert_eq!(highest_epoch(&site.db).await, 1);
}

#[tokio::test]
async fn epoch_begins_without_a_counting_majority_or_when_exhausted() {
    let mut site = Site::new().await;
    let leases = site.issuer().await;
    let mut last = grant_and_release(&leases).await;
    for nodes in [[0, 1], [2, 0]] {
        let epoch_before = epoch(&last);
        site.restart_empty(nodes[0]).await;
        for _ in 0..5 {
            last = grant_and_release(&leases).await;
            // The epoch continues on the other nodes.
            assert_eq!(epoch(&last), epoch_before);
        }
        site.restart_empty(nodes[1]).await;
        eventually("an epoch begins", async || {
            // Until both nodes answer again, there may be no majority.
            let Ok(next) = leases.acquire(&sku(), Acquire::new(LONG)).await else {
                return false;
            };
            leases.release(&sku(), &next.id).await.unwrap();
            assert!(next.token > last.token);
            last = next;
            epoch(&last) > epoch_before
        })
        .await;
        assert_eq!(epoch(&last), epoch_before + 1);
        assert_eq!(epoch(&grant_and_release(&leases).await), epoch(&last));
    }
    // FLUSHALL keeps the replication id.
    for node in &site.nodes[1..] {
        node.command(&["FLUSHALL"]).await;
    }
    let next = grant_and_release(&leases).await;
    assert_eq!(epoch(&next), epoch(&last) + 1);

    site.set_counters(Epoch::SIZE - 2).await;
    let last = grant_and_release(&leases).await;
    assert_eq!(last.token.get() % Epoch::SIZE, Epoch::SIZE - 1);
    let next = grant_and_release(&leases).await;
    assert_eq!(next.token.get(), (epoch(&last) + 1) * Epoch::SIZE + 1);
}

#[tokio::test]
async fn issuer_ignores_counters_below_those_it_saw() {
    let site = Site::new().await;
    let leases = site.issuer().await;
    for _ in 0..5 {
        grant_and_release(&leases).await;
    }
    let held = grant(&leases, &sku(), LONG).await;
    site.set_counters(2).await;
    is_lost(leases.renew(&sku(), &held.id, Renew::new(LONG)).await);
    leases.release(&sku(), &held.id).await.unwrap();
    let next = grant(&leases, &sku(), LONG).await;
    assert!(next.token > held.token);
}

#[tokio::test]
async fn grants_leave_an_epoch_ended_by_the_database() {
    let site = Site::new().await;
    let leases = site.issuer().await;
    let last = grant_and_release(&leases).await;
    site.db.fence().after_failover().await.unwrap();
    // This issuer has not read the epoch from the database yet.
    let next = grant_and_release(&site.issuer().await).await;
    assert!(epoch(&next) > epoch(&last) + 1, "{next:?}");
    // From here on, all issuers count in the new epoch.
    let after = grant_and_release(&leases).await;
    assert_eq!(epoch(&after), epoch(&next));
    assert!(after.token > next.token);
}

/// The answer to the first request was lost. The client retries at an issuer that has not read the
/// epoch from the database yet.
#[tokio::test]
async fn repeated_request_gets_no_token_of_an_ended_epoch() {
    let site = Site::new().await;
    let first = grant(&site.issuer().await, &sku(), LONG).await;
    site.db.fence().after_failover().await.unwrap();
    let request = || Acquire::new(LONG).lease_id(first.id.clone());
    let leases = site.issuer().await;
    let again = leases.acquire(&sku(), request()).await.unwrap();
    assert!(epoch(&again) > epoch(&first) + 1, "{again:?}");
    let third = leases.acquire(&sku(), request()).await.unwrap();
    assert_eq!(third.token, again.token);
}

/// An issuer whose wall clock was ahead has used this lease id before.
#[tokio::test]
async fn attempt_exceeds_one_numbered_ahead_of_the_time() {
    let site = Site::new().await;
    let leases = site.issuer().await;
    let first = grant(&leases, &sku(), LONG).await;
    let key = site.lease();
    for node in &site.nodes {
        // `id:number:nonce:…`
        let value = node.command(&["GET", &key]).await;
        let value: String = redis::from_redis_value(value).unwrap();
        let mut parts: Vec<_> = value.splitn(3, ':').collect();
        parts[1] = "4000000000000000";
        let value = parts.join(":");
        node.command(&["SET", &key, &value, "KEEPTTL"]).await;
    }
    let again = Acquire::new(LONG).lease_id(first.id.clone());
    let again = leases.acquire(&sku(), again).await.unwrap();
    assert_eq!(again.token, first.token);
}

#[tokio::test]
async fn leases_continue_without_the_database_while_a_majority_counts() {
    let mut site = Site::new().await;
    let away = Away::of(&site.db);
    let leases = site.issuer_with(away.clone()).await;
    let held = grant(&leases, &sku(), LONG).await;
    away.set(true);
    let neighbour = site.neighbour();
    site.restart_empty(2).await;
    let other = grant(&leases, &neighbour, LONG).await;
    leases.release(&neighbour, &other.id).await.unwrap();
    // The lease is on the other two nodes.
    keeps_its_token(&leases, &held).await;
    site.restart_empty(1).await;
    eventually!(
        "the nodes answer again",
        matches!(leases.inspect(&sku()).await, Ok(None))
    );
    is_unavailable(leases.acquire(&neighbour, Acquire::new(LONG)).await);
    // The failed request has left nothing for which another request would have to wait.
    away.set(false);
    let next = grant(&leases, &neighbour, LONG).await;
    assert_eq!(epoch(&next), epoch(&other) + 1);
}
