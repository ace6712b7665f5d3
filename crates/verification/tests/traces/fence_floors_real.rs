//! The implementations of the steps of the floors model (raises and removals), by the crate and by
//! the SQL functions.

use std::time::Duration;

use sqlx::{Connection, Postgres, pool::PoolConnection};
use tower_fence::LiveTokens;
use tower_fence_model::fence::floors::{FORGED, MOVE};

use super::{
    fence_failover,
    fence_real::{Crate, Functions, Real, Stale, Writes, refusal},
};
use crate::support::{
    database::{Fresh, TestDatabase},
    fence::token,
    functions,
};

/// A removal of the idle rows of a partition. The removal keeps the rows that `live` tokens need.
pub struct Idle {
    pub partition: u8,
    pub live: LiveTokens,
    pub lowest: Option<i64>,
}

/// The steps that only the floors model has.
pub trait Partition: Real {
    /// Raises the fence. Returns the open transaction, if it stays open, as with the functions.
    async fn open_raise(
        &self,
        name: &tower_fence::Resource,
        token: i64,
    ) -> Result<Option<Self::Open>, Stale>;

    /// Removes idle rows. Returns their number, and the transaction if it stays open.
    async fn remove(&self, idle: Idle) -> (u64, Option<Self::Open>);
}

const HOUR: Duration = Duration::from_secs(60 * 60);

impl<DB: Writes> Partition for Crate<DB> {
    async fn open_raise(
        &self,
        name: &tower_fence::Resource,
        token: i64,
    ) -> Result<Option<Self::Open>, Stale> {
        self.raise(name, token).await.map(|()| None)
    }

    async fn remove(&self, idle: Idle) -> (u64, Option<Self::Open>) {
        let live = idle.live.granted_up_to(token(real_token(FORGED - 1)));
        let fence = self.database().fence();
        let removed = fence.remove_idle_below(HOUR, 10, &live).await;
        (removed.unwrap(), None)
    }
}

impl Partition for Functions {
    async fn open_raise(
        &self,
        name: &tower_fence::Resource,
        token: i64,
    ) -> Result<Option<Self::Open>, Stale> {
        let mut conn = begin(self.database()).await;
        match functions::raise(&mut conn, name.as_str(), token).await {
            Ok(_) => Ok(Some(conn)),
            Err(refused) => {
                self.roll_back(conn).await;
                Err(refusal(refused))
            }
        }
    }

    async fn remove(&self, idle: Idle) -> (u64, Option<Self::Open>) {
        let mut conn = begin(self.database()).await;
        let live = idle
            .lowest
            .map_or("NULL".to_owned(), |live| live.to_string());
        let remove = format!(
            "SELECT tower_fence.remove_idle_of({}::smallint, '1 hour', 10, {}, {live})::bigint",
            idle.partition,
            real_token(FORGED - 1)
        );
        let removed = Postgres::number(&mut conn, &remove).await.unwrap();
        (removed.unsigned_abs(), Some(conn))
    }
}

async fn begin(db: &Fresh<Postgres>) -> PoolConnection<Postgres> {
    let mut conn = db.pool.acquire().await.unwrap();
    conn.ping().await.unwrap();
    Postgres::execute(&mut conn, "BEGIN").await.unwrap();
    conn
}

pub fn real_token(token: u8) -> i64 {
    fence_failover::real_token(token, MOVE)
}
