//! Which epochs were handed out: a token of another one was made by nobody.
//!
//! 1. The highest epoch of each partition is remembered. Epochs only grow, so what is not above it
//!    needs no look at the database.
//! 2. What is above it is judged by a look that began after the request came. At most one look a
//!    second is made for each partition, which all who wait share: a flood of forged tokens is
//!    no flood of looks, and nobody is refused for an epoch that had just begun.
//! 3. A token that was announced as granted is known, whatever its epoch. That is looked up, at most
//!    once a second for each resource, where the epoch is not known.

use std::{
    array,
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::Duration,
};

use quick_cache::sync::Cache;
use tokio::{
    sync::Mutex,
    time::{Instant, sleep_until},
};

use super::{AdmitError, Admitted, AllAdmitted, Fence, FenceDatabase, session::Session};
use crate::{
    epochs::{Epoch, partition_of},
    token::Resource,
};

/// The time from one look at a partition to the next.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// What is known of the epochs of all partitions.
pub(super) struct HandedOut {
    partitions: [Partition; 256],
    /// The highest tokens that were announced, of resources for which an unknown one was presented,
    /// and when that was looked up.
    announced: Cache<Resource, (i64, Instant)>,
}

/// How many resources are remembered. The ones that were not asked for lately give way.
const RESOURCES: usize = 1_000;

struct Partition {
    /// The highest epoch that is known to be handed out; 0 before the first look.
    highest: AtomicI64,
    /// When the last look began, and how it ended. Whoever looks holds the lock.
    looked: Mutex<Option<(Instant, Result<(), AdmitError>)>>,
}

impl Default for HandedOut {
    fn default() -> Self {
        Self {
            partitions: array::from_fn(|_| Partition {
                highest: AtomicI64::new(0),
                looked: Mutex::new(None),
            }),
            announced: Cache::new(RESOURCES),
        }
    }
}

impl Partition {
    /// Whether an epoch was handed out, as far as is known or `look` finds.
    async fn has(
        &self,
        epoch: i64,
        look: impl AsyncFnOnce() -> Result<i64, AdmitError>,
    ) -> Result<bool, AdmitError> {
        if epoch <= self.highest.load(Relaxed) {
            return Ok(true);
        }
        let arrived = Instant::now();
        let mut looked = self.looked.lock().await;
        let before = looked.as_ref().map(|(began, _)| *began);
        if before.is_none_or(|began| began <= arrived) {
            if let Some(before) = before {
                sleep_until(before + BETWEEN_LOOKS).await;
            }
            let began = Instant::now();
            let found = look().await;
            if let Ok(highest) = found {
                self.highest.fetch_max(highest, Relaxed);
            }
            *looked = Some((began, found.map(drop)));
        }
        match &*looked {
            _ if epoch <= self.highest.load(Relaxed) => Ok(true),
            Some((_, Err(error))) => Err(error.clone()),
            _ => Ok(false),
        }
    }
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Finds the first token whose epoch was never handed out by this database.
    pub(crate) async fn unknown_epoch<'a>(
        &self,
        all: &'a AllAdmitted,
    ) -> Result<Option<&'a Admitted>, AdmitError> {
        for one in all.iter() {
            // Below the first epoch are the tokens of other issuers.
            let Some(epoch) = Epoch::of(one.token) else {
                return Ok(Some(one));
            };
            let number = partition_of(&one.resource);
            let partition = &self.handed_out.partitions[usize::from(number)];
            let look = async || self.highest_epoch(number).await;
            if !partition.has(epoch.get(), look).await? && !self.is_announced(one).await? {
                return Ok(Some(one));
            }
        }
        Ok(None)
    }

    async fn highest_epoch(&self, partition: u8) -> Result<i64, AdmitError> {
        let mut session = Session::begin(&self.connections, self.limits).await?;
        let tables = self.tables(&mut session).await?;
        let highest =
            session.run(async |conn| DB::handed_out_epoch(conn, &tables, partition).await);
        Ok(highest.await?.unwrap_or_default())
    }

    /// Whether an issuer of this database has announced a token as high as this one: where the fence
    /// outranked a grant, that got a token above its clock's, perhaps above all epochs. What was found
    /// is good for as long as a look at the epochs.
    async fn is_announced(&self, one: &Admitted) -> Result<bool, AdmitError> {
        let known = self.handed_out.announced.get(&one.resource);
        if let Some((announced, looked)) = known
            && (announced >= one.token.get() || looked.elapsed() < BETWEEN_LOOKS)
        {
            return Ok(announced >= one.token.get());
        }
        let looked = Instant::now();
        let mut session = Session::begin(&self.connections, self.limits).await?;
        let tables = self.tables(&mut session).await?;
        let announced = session.run(async |conn| DB::announced(conn, &tables, &one.resource).await);
        let announced = announced.await?.unwrap_or_default();
        let found = (announced, looked);
        self.handed_out
            .announced
            .insert(one.resource.clone(), found);
        Ok(announced >= one.token.get())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_forged_tokens_is_no_flood_of_looks() {
        let known = Arc::new(HandedOut::default());
        let (looks, highest) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(7)));
        let has = |epoch| {
            let (known, looks, highest) = (known.clone(), looks.clone(), highest.clone());
            tokio::spawn(async move {
                let look = async || {
                    looks.fetch_add(1, Relaxed);
                    Ok(highest.load(Relaxed))
                };
                known.partitions[3].has(epoch, look).await.unwrap()
            })
        };
        assert!(has(7).await.unwrap());
        assert!(has(1).await.unwrap());
        assert_eq!(looks.load(Relaxed), 1);
        let began = Instant::now();
        let forged: Vec<_> = (0..1_000).map(|n| has(8 + n)).collect();
        // One begins that is no forgery, while all of these wait to be judged.
        tokio::time::advance(BETWEEN_LOOKS / 2).await;
        highest.store(8, Relaxed);
        let eighth = has(8);
        let refused = futures_util::future::join_all(forged).await;
        let refused = refused.iter().filter(|has| matches!(has, Ok(false)));
        assert_eq!(refused.count(), 999);
        assert!(eighth.await.unwrap());
        assert!(looks.load(Relaxed) <= 3, "{looks:?}");
        assert!(began.elapsed() < 3 * BETWEEN_LOOKS);
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_fails_refuses_nobody_for_good() {
        let partition = &HandedOut::default().partitions[0];
        let fails = async || Err(AdmitError::Unavailable(Arc::new(sqlx::Error::PoolClosed)));
        partition.has(1, fails).await.unwrap_err();
        assert!(partition.has(1, async || Ok(1)).await.unwrap());
    }
}
