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

use crate::{fence::error::AdmitError, token::Resource};

/// The time from one look at a partition to the next.
pub(in crate::fence) const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// What is known of the epochs of all partitions.
pub(in crate::fence) struct HandedOutEpochs {
    pub(in crate::fence) partitions: [Partition; 256],
    /// The highest tokens that were announced, of resources for which an unknown one was presented,
    /// and when that was looked up.
    pub(in crate::fence) announced: Cache<Resource, (i64, Instant)>,
}

/// How many resources are remembered. The ones that were not asked for lately give way.
const RESOURCES: usize = 1_000;

pub(in crate::fence) struct Partition {
    /// The highest epoch that is known to be handed out; 0 before the first look.
    highest: AtomicI64,
    /// When the last look began, and how it ended. The lock is held during a look.
    looked: Mutex<Option<(Instant, Result<(), AdmitError>)>>,
}

impl Default for HandedOutEpochs {
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
    pub(in crate::fence) async fn has(
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_forged_tokens_is_no_flood_of_looks() {
        let known = Arc::new(HandedOutEpochs::default());
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
        let partition = &HandedOutEpochs::default().partitions[0];
        let fails = async || Err(AdmitError::Unavailable(Arc::new(sqlx::Error::PoolClosed)));
        partition.has(1, fails).await.unwrap_err();
        assert!(partition.has(1, async || Ok(1)).await.unwrap());
    }
}
