//! Operations on the fence's tables other than admissions.

use std::time::Duration;

use sqlx::Database;

use super::{HighestStale, On, StateRow};
use crate::{
    announce::LeaseDigest,
    fence::Claim,
    token::{Resource, Token},
};

#[trait_variant::make(Send)]
pub(crate) trait Tables: Database {
    /// Makes every token below that of the claim stale, and returns the highest stale token, which
    /// may be that token or higher. Returns `None` in the case of [`Admission::Behind`].
    async fn raise(on: On<'_, Self>, claim: &Claim) -> sqlx::Result<Option<HighestStale>>;

    /// Reads `max_token` of a resource. If the resource has no row, reads the floor of its
    /// partition. Returns `None` if no token is stale.
    async fn max_token(on: On<'_, Self>, resource: &Resource) -> sqlx::Result<Option<i64>>;

    /// Records a grant and raises the fence to the granted token, unless the fence has received a
    /// higher token. If the grant `renews` its lease, the last announcement must be of that lease,
    /// and no higher token may have been used.
    async fn announce(
        on: On<'_, Self>,
        claim: &Claim,
        lease: &LeaseDigest,
        renews: bool,
    ) -> sqlx::Result<Announcement>;

    /// Reads whether this grant is the last announcement, and its token is not stale. On Postgres,
    /// the SQL function reads this.
    fn is_announced(
        _: On<'_, Self>,
        _: &Claim,
        _: &LeaseDigest,
    ) -> impl Future<Output = sqlx::Result<bool>> {
        async { Ok(false) }
    }

    /// Sets `max_token` to the token of the claim, unless the database has recorded grants of
    /// higher tokens. Returns the highest granted token that the database has recorded. If it is
    /// above the token of the claim, nothing was changed.
    async fn reset(on: On<'_, Self>, claim: &Claim) -> sqlx::Result<i64>;

    /// Moves a resource to the current timeline of the database, and returns whether it was on
    /// another timeline. Its earlier tokens are then stale, even if the database has lost the
    /// record of their grants.
    fn catch_up(_: On<'_, Self>, _: &Resource) -> impl Future<Output = sqlx::Result<bool>> {
        async { Ok(false) }
    }

    /// Makes all tokens stale that have been granted, even if the database has lost the record of
    /// their grants. Returns false, and changes no token, if no partition has an epoch.
    async fn after_failover(on: On<'_, Self>) -> sqlx::Result<bool>;

    /// Removes idle rows of a partition, raises the floor of the partition to the highest token of
    /// the removed rows, and returns the number of removed rows.
    async fn remove_idle(on: On<'_, Self>, partition: u8, idle: Idle) -> sqlx::Result<u64>;

    /// Begins the next epoch of a partition, durably, and returns the epoch, which is not below
    /// `at_least`.
    async fn next_epoch(on: On<'_, Self>, partition: u8, at_least: i64) -> sqlx::Result<i64>;

    /// Makes sure, durably, that the next epoch of a partition is above `seen`, and returns the
    /// floor of the partition.
    async fn report_epoch(on: On<'_, Self>, partition: u8, seen: i64) -> sqlx::Result<i64>;

    async fn state(on: On<'_, Self>, resource: &Resource) -> sqlx::Result<Option<StateRow>>;

    /// Reads the rows of the names in a range that come after the given name, in the order of their
    /// names, byte by byte.
    async fn states(
        on: On<'_, Self>,
        first_and_last: [&str; 2],
        after: &str,
        limit: u32,
    ) -> sqlx::Result<Vec<StateRow>>;

    async fn floor(on: On<'_, Self>, partition: u8) -> sqlx::Result<i64>;

    async fn last_epoch(on: On<'_, Self>, partition: u8) -> sqlx::Result<Option<i64>>;

    /// Reads whether leases in this database have an epoch in a partition.
    async fn has_leases(on: On<'_, Self>, partition: u8) -> sqlx::Result<bool>;

    /// Reads the identity of this source of epochs.
    async fn source_id(on: On<'_, Self>) -> sqlx::Result<String>;

    /// Reads the floors that are not 0.
    async fn floors(on: On<'_, Self>) -> sqlx::Result<Vec<(i16, i64)>>;
}

/// Criteria for removing idle rows of a partition, and the maximum number of rows to remove.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    pub(in crate::fence) older_than: Duration,
    pub(in crate::fence) at_most: u32,
    /// The highest token known to have been granted, or `None` for the last token of the last
    /// epoch.
    pub(in crate::fence) granted: Option<Token>,
    /// The lowest token of the held leases in the partition, if known.
    pub(in crate::fence) live: Option<Token>,
}

pub(crate) enum Announcement {
    /// The token was announced, and all lower tokens are stale.
    Announced,
    /// The fence has already received the token `highest`, which is not below the announced token.
    /// `was_last` is true if this same grant was the last announcement. Nothing was changed.
    Superseded { highest: i64, was_last: bool },
    /// The cause is that of [`Admission::Behind`], or another transaction has inserted the row in
    /// the meantime.
    Behind,
}
