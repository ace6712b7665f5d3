//! Requests for leases in Postgres whose answers are lost in transit.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use sqlx::Postgres;
use tokio::time::sleep;
use tower_fence::{
    Fence,
    lease::{Acquire, LeaseId, Leases, PostgresLeases},
};

use crate::support::{
    database::{Fresh, TestDatabase, pool_of},
    lease::{LONG, is_held, is_unavailable, sku},
    proxy::{Passage, Proxy, Sender},
    soon,
};

/// Two stores. The first one can lose its next answer about `sku-1`. The second one receives all
/// answers.
struct Site {
    losing: PostgresLeases,
    leases: PostgresLeases,
    loses: Arc<AtomicBool>,
    _proxy: Proxy,
    _db: Fresh<Postgres>,
}

impl Site {
    async fn new() -> Self {
        let db = Postgres::fresh(4).await;
        let loses = Arc::<AtomicBool>::default();
        let is_next = Arc::clone(&loses);
        let mut is_asked = false;
        let proxy = Proxy::judging(db.addr(), move |sender, message| match sender {
            Sender::Client => {
                // The message contains the name of the resource as an argument, after the
                // statement.
                if message.windows(5).any(|part| part == b"sku-1") {
                    is_asked = is_next.swap(false, SeqCst);
                }
                Passage::Whole
            }
            Sender::Server if is_asked => Passage::CutAfter(0),
            Sender::Server => Passage::Whole,
        })
        .await;
        let pool = pool_of(&proxy.url(&db.url), 2).await;
        Self {
            losing: PostgresLeases::new(Fence::new(pool)),
            leases: PostgresLeases::new(db.fence()),
            loses,
            _proxy: proxy,
            _db: db,
        }
    }

    async fn is_held(&self) -> bool {
        self.leases.inspect(&sku()).await.unwrap().is_some()
    }
}

#[tokio::test]
async fn repeated_request_with_a_chosen_id_has_the_lease() {
    let site = Site::new().await;
    let request = || Acquire::new(LONG).lease_id(LeaseId::new("a".repeat(22)).unwrap());
    site.loses.store(true, SeqCst);
    is_unavailable(site.losing.acquire(&sku(), request()).await);
    let held = site.leases.inspect(&sku()).await.unwrap();
    let token = held.expect("the lease was not granted").token;
    // No task releases the lease in the meantime.
    sleep(Duration::from_millis(500)).await;
    assert!(site.is_held().await);
    let again = site.losing.acquire(&sku(), request()).await.unwrap();
    assert_eq!(again.token, token);
    is_held(site.leases.acquire(&sku(), Acquire::new(LONG)).await);
}

/// No client knows the lease id, so no client could release the lease.
#[tokio::test]
async fn lease_with_an_unknown_id_is_released() {
    let site = Site::new().await;
    site.loses.store(true, SeqCst);
    is_unavailable(site.losing.acquire(&sku(), Acquire::new(LONG)).await);
    assert!(!site.loses.load(SeqCst), "no answer was lost");
    soon!("the lease is released", !site.is_held().await);
}
