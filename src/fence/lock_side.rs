//! What the lock side asks of a fence: epochs that survive its store, and word of each grant.

use super::{AdmitError, Fence, FenceDatabase, raise::commit, session::Session};
use crate::{
    announce::{Announce, AnnounceError, AnnounceFuture},
    epochs::{Epoch, EpochError, EpochFuture, Epochs},
    token::{Resource, Token},
};

/// The epochs of this crate's issuers, kept in the table `fence_epochs`.
impl<DB: FenceDatabase> Epochs for Fence<DB> {
    fn next_epoch(&self, partition: u8, at_least: Epoch) -> EpochFuture<'_> {
        Box::pin(async move {
            let unreachable = |error: AdmitError| EpochError::Unreachable(Box::new(error));
            let mut session = Session::begin(&self.connections, self.limits)
                .await
                .map_err(unreachable)?;
            let epoch = session
                .run(async |conn| DB::next_epoch(conn, partition, at_least.get()).await)
                .await
                .map_err(unreachable)?;
            commit(session).await.map_err(unreachable)?;
            Epoch::new(epoch)
        })
    }
}

/// A grant raises the fence: everyone older is dead before the new holder hears of it.
impl<DB: FenceDatabase> Announce for Fence<DB> {
    fn announce<'a>(&'a self, resource: &'a Resource, token: Token) -> AnnounceFuture<'a> {
        Box::pin(async move {
            match self.raise(resource, token).await {
                Ok(()) => Ok(()),
                // Announced before, and used since.
                Err(AdmitError::Stale(stale)) if stale.max_token == token.get() => Ok(()),
                Err(AdmitError::Stale(stale)) => Err(AnnounceError::Outranked {
                    token,
                    max_token: stale.max_token,
                }),
                Err(error) => Err(AnnounceError::Unreachable(Box::new(error))),
            }
        })
    }
}
