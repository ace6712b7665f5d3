//! A load on five nodes, and the rules that it checks.
//!
//! Clients acquire, sometimes write through the fence, and release. Some keep a lease past its
//! expiry, and write then. Whatever happens to the nodes:
//!
//! - A grant has a higher token than every grant that was returned before its request, and no two
//!   grants have the same token.
//! - With the fence, no write of an older holder follows a write of a newer holder.
//!
//! If the nodes lose no data, no two clients hold a lease at the same time.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::join_all;
use sqlx::Sqlite;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};
use tower_fence::{
    Fence, Resource, Token, TokenUse,
    lease::{Acquire, LeaseId, Leases, Renew},
};
use tower_fence_redlock::QuorumLeases;

use super::naive::Naive;
use crate::{
    grant_load::{Grant, out_of_order},
    support::{database::Fresh, eventually, nodes::Nodes},
};

/// The resources of the load. The first two are in one partition.
const RESOURCES: [&str; crate::grant_load::RESOURCES] = ["sku-1", "sku-124", "sku-2"];
const CLIENTS: usize = 5;
pub const TTL: Duration = Duration::from_millis(300);

#[derive(Clone)]
pub enum Issuer {
    Ours(QuorumLeases),
    Naive(Naive),
}

impl Issuer {
    /// Returns a token if the lease is free.
    pub async fn acquire(&self, resource: &str, id: &str, ttl: Duration) -> Option<i64> {
        match self {
            Self::Ours(leases) => {
                let request = Acquire::new(ttl).lease_id(LeaseId::new(id).unwrap());
                let resource = Resource::new(resource).unwrap();
                let lease = leases.acquire(&resource, request).await.ok()?;
                Some(lease.token.get())
            }
            Self::Naive(naive) => naive.acquire(resource, id, ttl).await,
        }
    }

    /// Returns the token if the lease is still held. The naive protocol has no renewals.
    pub async fn renew(&self, resource: &str, id: &str, ttl: Duration) -> Option<i64> {
        let Self::Ours(leases) = self else {
            return None;
        };
        let (resource, id) = (Resource::new(resource).unwrap(), LeaseId::new(id).unwrap());
        let lease = leases.renew(&resource, &id, Renew::new(ttl)).await.ok()?;
        Some(lease.token.get())
    }

    pub async fn release(&self, resource: &str, id: &str) {
        match self {
            Self::Ours(leases) => {
                let (resource, id) = (Resource::new(resource).unwrap(), LeaseId::new(id).unwrap());
                let _ = leases.release(&resource, &id).await;
            }
            Self::Naive(naive) => naive.release(resource, id).await,
        }
    }
}

pub fn fresh_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// A grant, and the write under it.
#[derive(Clone, Copy, Debug)]
pub struct Hold {
    pub grant: Grant,
    /// The time of the release or of the expiry.
    until: Instant,
    /// The position of this write in the order of all writes, if the fence admitted it.
    write: Option<i64>,
}

pub struct Load {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<()>>,
}

struct Shared {
    name: &'static str,
    issuers: Mutex<Vec<Issuer>>,
    fence: Fence<Sqlite>,
    holds: Mutex<Vec<Hold>>,
    stop: AtomicBool,
}

impl Load {
    /// Starts clients at two issuers that share only the nodes and the database.
    pub fn on_ours(nodes: &Nodes, db: &Fresh<Sqlite>) -> Self {
        Self::start("ours", db, two_issuers(nodes, db))
    }

    /// Starts clients at two issuers, each of which has its own connections, and calls the nodes in
    /// another order.
    pub fn on_naive(naive: Naive, name: &'static str, db: &Fresh<Sqlite>) -> Self {
        let issuers = [naive.reversed(), naive];
        Self::start(name, db, issuers.map(Issuer::Naive).into())
    }

    fn start(name: &'static str, db: &Fresh<Sqlite>, issuers: Vec<Issuer>) -> Self {
        let shared = Arc::new(Shared {
            name,
            issuers: Mutex::new(issuers),
            fence: db.fence(),
            holds: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let client = |n| tokio::spawn(Arc::clone(&shared).client(n));
        Self {
            clients: (0..CLIENTS).map(client).collect(),
            shared,
        }
    }

    /// Waits for this number of further grants of each resource that are requested from now on.
    pub async fn more(&self, count: usize) {
        let now = Instant::now();
        eventually("grants continue", async || {
            let holds = self.holds_since(now);
            let of = |resource| {
                holds
                    .iter()
                    .filter(move |hold| hold.grant.resource == resource)
            };
            (0..RESOURCES.len()).all(|resource| of(resource).count() >= count)
        })
        .await;
    }

    /// Returns the grants that were requested at this time or later.
    pub fn holds_since(&self, began: Instant) -> Vec<Hold> {
        let holds = self.shared.holds.lock().unwrap();
        let since = holds.iter().filter(|hold| hold.grant.began >= began);
        since.copied().collect()
    }

    pub fn holds(&self) -> Vec<Hold> {
        self.shared.holds.lock().unwrap().clone()
    }

    pub async fn stop(self) -> Vec<Hold> {
        self.shared.stop.store(true, Relaxed);
        join_all(self.clients)
            .await
            .into_iter()
            .for_each(Result::unwrap);
        std::mem::take(&mut *self.shared.holds.lock().unwrap())
    }
}

fn two_issuers(nodes: &Nodes, db: &Fresh<Sqlite>) -> Vec<Issuer> {
    vec![
        Issuer::Ours(nodes.leases(db)),
        Issuer::Ours(nodes.leases(db)),
    ]
}

impl Shared {
    async fn client(self: Arc<Self>, n: usize) {
        for turn in n.. {
            if self.stop.load(Relaxed) {
                return;
            }
            let issuers = self.issuers.lock().unwrap().clone();
            let issuer = &issuers[turn % issuers.len()];
            let (resource, id) = (turn % RESOURCES.len(), fresh_id());
            let began = Instant::now();
            let Some(token) = issuer.acquire(RESOURCES[resource], &id, TTL).await else {
                sleep(Duration::from_millis(rand::random_range(1..10))).await;
                continue;
            };
            let ended = Instant::now();
            let sleeps_past_its_lease = rand::random_ratio(1, 40);
            if sleeps_past_its_lease {
                sleep(TTL + TTL / 4).await;
            }
            let mut write = None;
            if sleeps_past_its_lease || turn % 4 == 0 {
                write = self.write(RESOURCES[resource], token).await;
            }
            let until = Instant::now().min(began + TTL);
            self.holds.lock().unwrap().push(Hold {
                grant: Grant {
                    resource,
                    token,
                    began,
                    ended,
                },
                until,
                write,
            });
            issuer.release(RESOURCES[resource], &id).await;
        }
    }

    async fn write(&self, resource: &str, token: i64) -> Option<i64> {
        // Each load has its own resources, like a separate application.
        let resource = Resource::new(format!("{}-{resource}", self.name)).unwrap();
        let token = Token::new(token).unwrap();
        let admitted = self.fence.begin(&resource, token, TokenUse::Reusable);
        let mut tx = admitted.await.ok()?;
        let insert = "INSERT INTO ledger VALUES (NULL) RETURNING rowid";
        let number = sqlx::query_scalar(insert).fetch_one(&mut *tx).await.ok()?;
        tx.commit().await.ok()?;
        Some(number)
    }
}

/// Returns a violation of the rules that hold under every fault, if there is one.
pub fn harm(holds: &[Hold]) -> Option<String> {
    let grants: Vec<Grant> = holds.iter().map(|hold| hold.grant).collect();
    if let Some(pair) = out_of_order(&grants) {
        return Some(format!("tokens: {pair:?}"));
    }
    let write = |hold: &Hold| {
        let number = hold.write?;
        Some(Grant {
            token: number,
            ..hold.grant
        })
    };
    let writes: Vec<Grant> = holds.iter().filter_map(write).collect();
    out_of_order(&writes).map(|pair| format!("writes: {pair:?}"))
}

/// Returns two clients that held a lease at the same time.
pub fn held_at_once(holds: &[Hold]) -> Option<(Hold, Hold)> {
    let mut holds: Vec<&Hold> = holds
        .iter()
        .filter(|hold| hold.until > hold.grant.ended)
        .collect();
    holds.sort_by_key(|hold| (hold.grant.resource, hold.grant.ended));
    let overlap = holds.windows(2).find(|pair| {
        let same = pair[0].grant.resource == pair[1].grant.resource;
        same && pair[1].grant.ended < pair[0].until
    });
    overlap.map(|pair| (*pair[0], *pair[1]))
}

/// Stops both loads. Checks that our grants violate no rule, and that the naive ones do. Otherwise
/// the load would not detect a loss.
pub async fn only_the_naive_is_harmed(ours: Load, naive: Load) {
    assert_eq!(harm(&ours.stop().await), None);
    let naive = naive.stop().await;
    assert!(
        harm(&naive).is_some(),
        "the load does not detect lost tokens"
    );
}
