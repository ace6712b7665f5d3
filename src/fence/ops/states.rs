//! State of the fence, for operators. No write depends on it.

use std::time::Duration;

use crate::{
    epochs::{Epoch, partition_of},
    fence::{
        Fence,
        error::AdmitError,
        sql::{FenceDatabase, On, StateRow},
    },
    token::{Resource, Token},
};

/// Row of a resource in the fence's table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FenceRow {
    /// The resource.
    pub resource: Resource,
    /// The highest stale token, 0 or more.
    pub max_token: i64,
    /// The highest token that was announced as granted, if there is one.
    pub announced: Option<Token>,
    /// The time since the last use, according to the clock of the database. A use is a write, a
    /// fenced read, a raise or an announced grant.
    pub idle: Duration,
}

/// State of the fence for a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FenceState {
    /// The row of the resource, if it has one.
    pub row: Option<FenceRow>,
    /// The partition of the resource.
    pub partition: u8,
    /// The floor of that partition, which is the highest stale token of the resources without a
    /// row. The floor is 0 until a row is removed, or a failover makes tokens stale.
    pub floor: i64,
    /// The lowest value to which [`Fence::reset`] can set `max_token`. According to the database,
    /// issuers may have granted tokens up to this value. It is the highest announced token of the
    /// resource, unless that is the highest possible token, or the beginning of the last epoch that
    /// was assigned in the partition, if that is higher. If the resource has no announced token,
    /// for example because its row was removed, and leases are in this database, it is at least the
    /// lower one of the floor and the end of that epoch.
    pub granted: i64,
}

impl FenceState {
    /// Returns the highest stale token: `max_token` of the row or, without a row, the floor.
    #[must_use]
    pub fn max_token(&self) -> i64 {
        self.row.as_ref().map_or(self.floor, |row| row.max_token)
    }
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Returns `max_token`, the highest stale token of a resource, or `None` if no token is stale.
    ///
    /// For a resource without a row, this is the floor of its partition; see
    /// [`remove_idle`](Self::remove_idle). If the database was promoted or restored, and the
    /// resource has not been used since, higher tokens are stale as well; see
    /// [`after_failover`](Self::after_failover).
    ///
    /// # Errors
    ///
    /// Returns the errors of [`begin`](Self::begin) except [`AdmitError::Stale`].
    pub async fn inspect(&self, resource: &Resource) -> Result<Option<i64>, AdmitError> {
        self.read(async |on| DB::max_token(on, resource).await)
            .await
    }

    /// Reads the state of the fence for a resource.
    ///
    /// The result is for operators, and contains more details than that of
    /// [`inspect`](Self::inspect).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// # use tower_fence::{Fence, Resource, Token, TokenUse};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let fence = Fence::new(options.connect("sqlite::memory:").await?);
    /// # fence.migrate().await?;
    /// let resource = Resource::new("sku-1")?;
    /// assert_eq!(fence.state(&resource).await?.row, None);
    /// fence.raise(&resource, Token::new(34)?).await?;
    /// assert_eq!(fence.state(&resource).await?.max_token(), 33);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the errors of [`begin`](Self::begin) except [`AdmitError::Stale`].
    pub async fn state(&self, resource: &Resource) -> Result<FenceState, AdmitError> {
        let partition = partition_of(resource);
        let read = self.read(async |On { conn, names }| {
            let row = DB::state(On::new(conn, names), resource).await?;
            let floor = DB::floor(On::new(conn, names), partition).await?;
            let epoch = DB::last_epoch(On::new(conn, names), partition).await?;
            let has_leases = DB::has_leases(On::new(conn, names), partition).await?;
            Ok((row, floor, epoch, has_leases))
        });
        let (row, floor, epoch, has_leases) = read.await?;
        let row = row.and_then(fence_row);
        let announced = row.as_ref().and_then(|row| row.announced);
        // A forged token can force a grant of the highest token, and `reset` must be able to set
        // `max_token` below that grant.
        let announced = announced.filter(|announced| *announced < Token::MAX);
        // The removal of a row also removes its announced token. Then only the floor shows the
        // tokens of leases in this database. The SQL function `reset` uses the same rule.
        let last_token = epoch.map_or(0, |epoch| (epoch + 1) * Epoch::SIZE - 1);
        let removed = match has_leases && announced.is_none() {
            true => floor.min(last_token),
            false => 0,
        };
        let begun = epoch.map_or(0, |epoch| epoch * Epoch::SIZE);
        Ok(FenceState {
            row,
            partition,
            floor,
            granted: announced.map_or(0, Token::get).max(begun).max(removed),
        })
    }

    /// Lists the rows of resources whose names begin with `prefix`, at most `limit` of them,
    /// ordered by name. `after` is the last resource of the previous page.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`state`](Self::state).
    pub async fn states(
        &self,
        prefix: &str,
        after: Option<&Resource>,
        limit: u32,
    ) -> Result<Vec<FenceRow>, AdmitError> {
        // No name of up to 255 bytes that begins with the prefix is greater than `last`.
        let last = format!(
            "{prefix}{}",
            "\u{10ffff}".repeat(Resource::MAX_BYTES / 4 + 1)
        );
        let rows = self.read(async |On { conn, names }| {
            let after = after.map_or("", Resource::as_str);
            DB::states(On::new(conn, names), [prefix, &last], after, limit).await
        });
        Ok(rows.await?.into_iter().filter_map(fence_row).collect())
    }

    /// Lists the floors that are not 0, by partition. The floor of a partition is the highest stale
    /// token of its resources without a row; see [`remove_idle`](Self::remove_idle).
    ///
    /// # Errors
    ///
    /// Returns the errors of [`state`](Self::state).
    pub async fn floors(&self) -> Result<Vec<(u8, i64)>, AdmitError> {
        let floors = self.read(async |on| DB::floors(on).await);
        let floors = floors.await?.into_iter();
        let in_range = |(partition, floor)| Some((u8::try_from(partition).ok()?, floor));
        Ok(floors.filter_map(in_range).collect())
    }
}

/// Converts a row. Returns `None` if the name is invalid, which means that the row was inserted by
/// hand.
fn fence_row((name, max_token, announced, idle_ms): StateRow) -> Option<FenceRow> {
    Some(FenceRow {
        resource: Resource::new(name).ok()?,
        max_token,
        announced: Token::new(announced).ok(),
        idle: Duration::from_millis(u64::try_from(idle_ms).unwrap_or(0)),
    })
}
