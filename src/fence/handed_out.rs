//! Which epochs were handed out: a token of another one was made by nobody.
//!
//! 1. The highest epoch of each partition is remembered. Epochs only grow, so what is not above it
//!    needs no look at the database.
//! 2. What is above it is judged by a look that began after the request came. At most one look a
//!    second is made for each partition, which all who wait share: a flood of forged tokens is
//!    no flood of statements, and nobody is refused for an epoch that had just begun.

use std::{
    array,
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::Duration,
};

use tokio::{
    sync::Mutex,
    time::{Instant, sleep_until},
};

use super::{AdmitError, Admitted, AllAdmitted, Fence, FenceDatabase, session::Session};
use crate::epochs::{Epoch, partition_of};

/// The time from one look at a partition to the next.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// What is known of the epochs of all partitions.
pub(super) struct HandedOut([Partition; 256]);

struct Partition {
    /// The highest epoch that is known to be handed out; 0 before the first look.
    highest: AtomicI64,
    /// When the last look began, and how it ended. Whoever looks holds the lock.
    looked: Mutex<Option<(Instant, Result<(), AdmitError>)>>,
}

impl Default for HandedOut {
    fn default() -> Self {
        Self(array::from_fn(|_| Partition {
            highest: AtomicI64::new(0),
            looked: Mutex::new(None),
        }))
    }
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Finds the first token whose epoch was never handed out by this database.
    pub(crate) async fn unknown_epoch<'a>(
        &self,
        all: &'a AllAdmitted,
    ) -> Result<Option<&'a Admitted>, AdmitError> {
        for one in all.iter() {
            if !self.is_handed_out(one).await? {
                return Ok(Some(one));
            }
        }
        Ok(None)
    }

    async fn is_handed_out(&self, one: &Admitted) -> Result<bool, AdmitError> {
        // Below the first epoch are the tokens of other issuers.
        let Some(epoch) = Epoch::of(one.token).map(Epoch::get) else {
            return Ok(false);
        };
        let number = partition_of(&one.resource);
        let partition = &self.handed_out.0[usize::from(number)];
        if epoch <= partition.highest.load(Relaxed) {
            return Ok(true);
        }
        let arrived = Instant::now();
        let mut looked = partition.looked.lock().await;
        let before = looked.as_ref().map(|(began, _)| *began);
        if before.is_none_or(|began| began <= arrived) {
            if let Some(before) = before {
                sleep_until(before + BETWEEN_LOOKS).await;
            }
            let began = Instant::now();
            let found = self.highest_handed_out(number).await;
            if let Ok(highest) = found {
                partition.highest.fetch_max(highest, Relaxed);
            }
            *looked = Some((began, found.map(drop)));
        }
        match &*looked {
            _ if epoch <= partition.highest.load(Relaxed) => Ok(true),
            Some((_, Err(error))) => Err(error.clone()),
            _ => Ok(false),
        }
    }

    async fn highest_handed_out(&self, partition: u8) -> Result<i64, AdmitError> {
        let mut session = Session::begin(&self.connections, self.limits).await?;
        let highest = session.run(async |conn| DB::handed_out_epoch(conn, partition).await);
        Ok(highest.await?.unwrap_or_default())
    }
}
