//! Announced grants. Each grant is announced before it is answered, and the grant to a dropped
//! request is released.

use std::sync::{Arc, Mutex, atomic::AtomicI64};

use shuttle::rand::{Rng, thread_rng};

use super::{
    FOR_EVER, Source, all, by_chance, resource, some_ms, tasks,
    waiters::{becomes_free, hold},
};
use crate::{
    announce::{Announce, AnnounceError, AnnounceFuture, LeaseDigest},
    lease::{Acquire, Announced, Lease, LeaseError, LeaseId, Leases, MemoryLeases, Renew},
    model::{clock::sleep, step, tokio::time::timeout},
    token::{Resource, Token},
};

/// The row of a fence.
#[derive(Default)]
struct Row {
    max_token: i64,
    announced: i64,
    lease: Option<LeaseDigest>,
}

impl Row {
    fn announce(
        &mut self,
        token: Token,
        lease: &LeaseDigest,
        renews: bool,
    ) -> Result<(), AnnounceError> {
        let is_mine = self.lease.as_ref() == Some(lease);
        let was_last = token.get() == self.announced && is_mine;
        let owns = self.announced == 0 || is_mine && self.max_token <= self.announced;
        if token.get() <= self.max_token
            || token.get() <= self.announced && !was_last
            || renews && !owns
        {
            let max_token = self.max_token.max(self.announced);
            return Err(AnnounceError::Superseded {
                max_token,
                was_last,
            });
        }
        self.max_token = self.max_token.max(token.get() - 1);
        self.announced = token.get();
        self.lease = Some(lease.clone());
        Ok(())
    }
}

/// A slow fence. Of ten messages in each direction, `losses` are lost.
#[derive(Clone)]
struct Fence {
    row: Arc<Mutex<Row>>,
    losses: u32,
}

impl Fence {
    fn new(losses: u32) -> Self {
        Self {
            row: Arc::default(),
            losses,
        }
    }

    async fn passes(&self) -> Result<(), AnnounceError> {
        step();
        sleep(some_ms([0, 1])).await;
        match thread_rng().gen_ratio(self.losses, 10) {
            true => Err(AnnounceError::Unreachable("away".into())),
            false => Ok(()),
        }
    }

    /// Simulates a write under a forged token.
    fn forged(&self) {
        step();
        let mut row = self.row.lock().unwrap();
        row.max_token = row.max_token.max(row.announced) + thread_rng().gen_range(0..3);
        row.lease = None;
    }

    /// Whether all tokens older than that of the lease are stale.
    fn covers(&self, lease: &Lease) -> bool {
        self.row.lock().unwrap().max_token >= lease.token.get() - 1
    }
}

impl Announce for Fence {
    fn announce<'a>(
        &'a self,
        _: &'a Resource,
        token: Token,
        lease: &'a LeaseDigest,
        renews: bool,
    ) -> AnnounceFuture<'a> {
        Box::pin(async move {
            self.passes().await?;
            let outcome = self.row.lock().unwrap().announce(token, lease, renews);
            self.passes().await?;
            outcome
        })
    }
}

/// Several requests use one lease id, and some of them leave. A client forges tokens.
pub async fn answered_grants_were_announced() {
    let fence = Fence::new(1);
    let leases = Arc::new(Announced::new(MemoryLeases::new(Source), fence.clone()));
    let id = LeaseId::random();
    let requests = tasks(4, |n| {
        let (leases, fence, id) = (leases.clone(), fence.clone(), id.clone());
        async move {
            let resource = resource();
            let ask = async |renews: bool, takes_new_token: bool| -> Result<Lease, LeaseError> {
                if !renews {
                    let request = Acquire::new(FOR_EVER).lease_id(id.clone());
                    return leases.acquire(&resource, request).await;
                }
                let renew = match takes_new_token {
                    true => Renew::new(FOR_EVER).with_new_token(),
                    false => Renew::new(FOR_EVER),
                };
                leases.renew(&resource, &id, renew).await
            };
            for _ in 0..2 {
                sleep(some_ms([0, 1, 3])).await;
                let (renews, takes_new_token) = (by_chance(), by_chance());
                let asked = ask(renews, takes_new_token);
                let answered = match n {
                    0 => {
                        fence.forged();
                        return;
                    }
                    1 => match timeout(some_ms([0, 1, 3]), asked).await {
                        Ok(answered) => answered,
                        Err(_) => continue,
                    },
                    _ => asked.await,
                };
                if let Ok(lease) = answered {
                    assert!(fence.covers(&lease), "answered before it was announced");
                }
            }
        }
    });
    all(requests).await;
}

/// Requests are dropped, and announcements fail. Each waiter still gets its turn.
pub async fn grants_to_dropped_requests_are_released() {
    let fence = Fence::new(2);
    let leases = Arc::new(Announced::new(MemoryLeases::new(Source), fence.clone()));
    let highest = Arc::new(AtomicI64::new(0));
    let holders = tasks(4, |n| {
        let (leases, highest) = (leases.clone(), highest.clone());
        async move {
            let resource = resource();
            let acquire = || leases.acquire(&resource, Acquire::new(FOR_EVER).wait(FOR_EVER));
            let lease = loop {
                let acquired = match n {
                    0 | 1 => match timeout(some_ms([0, 1, 2, 5]), acquire()).await {
                        Ok(acquired) => acquired,
                        Err(_) => return,
                    },
                    _ => acquire().await,
                };
                match acquired {
                    Ok(lease) => break lease,
                    Err(error) => assert!(matches!(error, LeaseError::Unavailable(_)), "{error:?}"),
                }
            };
            hold(&*leases, &lease, &highest).await;
        }
    });
    all(holders).await;
    becomes_free(&*leases).await;
}
