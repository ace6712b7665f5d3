//! Checks whether an issuer that takes its epochs from this database could have granted a token.

use crate::{
    epochs::{Epoch, partition_of},
    fence::{AdmitError, Claim, Claims, Fence, FenceDatabase},
    token::Resource,
};

impl<DB: FenceDatabase> Fence<DB> {
    /// Returns the first claim whose token has an epoch that this database has never issued.
    pub(crate) async fn unknown_epoch<'a>(
        &self,
        all: &'a Claims,
    ) -> Result<Option<&'a Claim>, AdmitError> {
        for one in all.iter() {
            // Tokens below the first epoch belong to other issuers.
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
        let highest = self.read(async |on| DB::last_epoch(on, partition).await);
        Ok(highest.await?.unwrap_or_default())
    }

    /// Returns whether an issuer has announced this token, or a higher one, to this database. Such
    /// a token may be above all epochs: if `max_token` was above the next value of the token
    /// counter, the issuer granted a token above `max_token`.
    async fn is_announced(&self, one: &Claim) -> Result<bool, AdmitError> {
        let announced = self.handed_out.announced(&one.resource);
        let look = async || self.highest_announced(&one.resource).await;
        announced.has(one.token.get(), look).await
    }

    async fn highest_announced(&self, resource: &Resource) -> Result<i64, AdmitError> {
        let announced = self.read(async |on| DB::announced(on, resource).await);
        Ok(announced.await?.unwrap_or_default())
    }
}
