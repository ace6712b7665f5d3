//! Operations of the fence for lease issuers: epochs, which survive a loss of the lease store, and
//! the announcement of each grant.

use std::time::Duration;

use super::transact::{Halt, Plan};
use crate::{
    announce::{Announce, AnnounceError, AnnounceFuture, LeaseDigest},
    epochs::{Epoch, EpochError, EpochFuture, Epochs, SourceId},
    fence::{
        Fence,
        claims::Claims,
        error::AdmitError,
        settings::{FIRST_LOCK_TIMEOUT, Limits},
        sql::{Announcement, FenceDatabase, On},
    },
    token::{Resource, Token},
};

/// Stores the epochs of this crate's issuers in the table `tower_fence.epochs`. The transactions
/// are durable even with `synchronous_commit = off`.
impl<DB: FenceDatabase> Epochs for Fence<DB> {
    fn next_epoch(&self, partition: u8, at_least: Epoch) -> EpochFuture<'_> {
        Box::pin(async move {
            let next = self.in_transaction(self.limits, async |on| {
                DB::next_epoch(on, partition, at_least.get()).await
            });
            Epoch::new(next.await.map_err(epoch_error)?)
        })
    }

    fn report_epoch(&self, partition: u8, seen: Epoch) -> EpochFuture<'_> {
        Box::pin(async move {
            let report = self.in_transaction(self.limits, async |on| {
                DB::report_epoch(on, partition, seen.get()).await
            });
            let floor = report.await.map_err(epoch_error)?;
            // This is the first epoch that contains tokens above the floor.
            let valid = Epoch::new((floor + 1) / Epoch::SIZE)?;
            Ok(valid.max(seen))
        })
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        Box::pin(async move {
            let id = self.read(async |on| DB::source_id(on).await);
            let id = id.await.map_err(epoch_error)?;
            SourceId::new(id).map_err(|error| EpochError::Unreachable(Box::new(error)))
        })
    }
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Makes the epochs that this database assigns begin above `token`, in all partitions.
    ///
    /// Call this when you replace another lock server with one of this crate's issuers, if the
    /// issuer's grants are [not announced](crate::guide::other_lock_servers#changing-the-issuer).
    ///
    /// `token` is the highest token that the other server has granted. The other server must no
    /// longer grant tokens. The call must precede the first grant of this crate's issuers, because
    /// an issuer that has already begun an epoch continues in that epoch. Leases in Postgres and
    /// announced grants do not need this call.
    ///
    /// # Errors
    ///
    /// Returns [`EpochError::Exhausted`] if there is no epoch above `token`,
    /// [`EpochError::Misconfigured`] if the database must be set up first, and
    /// [`EpochError::Unreachable`] if it is busy or unreachable.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the call has taken effect as a whole or not at all.
    pub async fn begin_epochs_above(&self, token: Token) -> Result<(), EpochError> {
        // If the token is below the first epoch, all epochs are above the token.
        let Some(highest) = Epoch::of(token) else {
            return Ok(());
        };
        Epoch::new(highest.get() + 1)?;
        self.in_transaction(self.limits.long(), async |On { conn, names }| {
            for partition in 0..=u8::MAX {
                DB::report_epoch(On::new(conn, names), partition, highest.get()).await?;
            }
            Ok(())
        })
        .await
        .map_err(epoch_error)
    }
}

fn epoch_error(error: impl Into<AdmitError>) -> EpochError {
    let error = error.into();
    match error.is_misconfigured() {
        true => EpochError::Misconfigured(Box::new(error)),
        false => EpochError::Unreachable(Box::new(error)),
    }
}

/// Raises the fence at a grant, so that older tokens are stale before the new holder gets its
/// lease.
impl<DB: FenceDatabase> Announce for Fence<DB> {
    fn announce<'a>(
        &'a self,
        resource: &'a Resource,
        token: Token,
        lease: &'a LeaseDigest,
        renews: bool,
    ) -> AnnounceFuture<'a> {
        Box::pin(async move {
            let one = Claims::one(resource.clone(), token);
            // A renewal whose announcement is already in the row must not wait for a write in
            // progress. The SQL function reads the row first, so try it although a write of this
            // process is in progress. In SQLite, a transaction would wait for any write.
            if renews && !DB::HAS_SERVER {
                let read = self.read(async |on| DB::is_announced(on, one.first(), lease).await);
                // If the read fails, the announcement returns the error.
                if let Ok(true) = read.await {
                    return Ok(());
                }
            }
            let announce = async |limits| self.announce_once(limits, &one, lease, renews).await;
            let ordered = one.in_lock_order();
            let _permits = match self.wait_in_queues(&ordered, Duration::ZERO).await {
                Ok(permits) => permits,
                Err(_) => {
                    if renews && DB::HAS_SERVER {
                        let limits = Limits {
                            lock_timeout: FIRST_LOCK_TIMEOUT,
                            ..self.limits
                        };
                        match announce(limits).await {
                            Err(AdmitError::Busy(_)) => {}
                            announced => return announced.map_err(announce_error)?,
                        }
                    }
                    let waited = self.wait_in_queues(&ordered, self.limits.lock_timeout);
                    waited.await.map_err(announce_error)?
                }
            };
            announce(self.limits).await.map_err(announce_error)?
        })
    }
}

impl<DB: FenceDatabase> Fence<DB> {
    async fn announce_once(
        &self,
        limits: Limits,
        claims: &Claims,
        lease: &LeaseDigest,
        renews: bool,
    ) -> Result<Result<(), AnnounceError>, AdmitError> {
        let announced = self.open(Plan::locking(limits, claims), async |transaction| {
            let announcement =
                transaction.run(async |on| DB::announce(on, claims.first(), lease, renews).await);
            match announcement.await? {
                Announcement::Announced => Ok(Ok(())),
                Announcement::Superseded { highest, was_last } => {
                    Ok(Err(AnnounceError::Superseded {
                        max_token: highest,
                        was_last,
                    }))
                }
                Announcement::Behind => Err(Halt::Behind),
            }
        });
        let (transaction, announced) = announced.await?;
        if announced.is_ok() {
            transaction.commit().await.map_err(AdmitError::at_commit)?;
        }
        Ok(announced)
    }
}

fn announce_error(error: impl Into<AdmitError>) -> AnnounceError {
    let error = error.into();
    match error.is_misconfigured() {
        true => AnnounceError::Misconfigured(Box::new(error)),
        false => AnnounceError::Unreachable(Box::new(error)),
    }
}
