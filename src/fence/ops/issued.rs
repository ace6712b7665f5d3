//! Checks whether an issuer that takes its epochs from this database could have granted a token.

use std::{
    array,
    sync::atomic::{AtomicI64, Ordering::Relaxed},
};

use crate::{
    epochs::{Epoch, partition_of},
    fence::{AdmitError, Claim, Claims, Fence, FenceDatabase, sql::On},
};

/// Highest epoch of each partition that a query has found. Epochs only grow, so a token whose epoch
/// is not above it needs no query.
pub(in crate::fence) struct IssuedEpochs([AtomicI64; 256]);

impl Default for IssuedEpochs {
    fn default() -> Self {
        Self(array::from_fn(|_| AtomicI64::new(0)))
    }
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Returns the first claim whose token has an epoch that this database has never assigned, and
    /// is above every token that was announced for its resource.
    ///
    /// An announced token may be above all epochs: if `max_token` was above the next value of the
    /// token counter, the issuer granted a token above `max_token`.
    pub(crate) async fn unknown_epoch<'a>(
        &self,
        claims: &'a Claims,
    ) -> Result<Option<&'a Claim>, AdmitError> {
        for claim in claims.iter() {
            // Tokens below the first epoch belong to other issuers.
            let Some(epoch) = Epoch::of(claim.token) else {
                return Ok(Some(claim));
            };
            let partition = partition_of(&claim.resource);
            let known = &self.issued_epochs.0[usize::from(partition)];
            if epoch.get() <= known.load(Relaxed) {
                continue;
            }
            let read = self.read(async |On { conn, names }| {
                let highest = DB::last_epoch(On::new(conn, names), partition).await?;
                let row = DB::state(On::new(conn, names), &claim.resource).await?;
                let announced = row.map_or(0, |(_, _, announced, _)| announced);
                Ok((highest.unwrap_or_default(), announced))
            });
            let (highest, announced) = read.await?;
            known.fetch_max(highest, Relaxed);
            if epoch.get() > highest && claim.token.get() > announced {
                return Ok(Some(claim));
            }
        }
        Ok(None)
    }
}
