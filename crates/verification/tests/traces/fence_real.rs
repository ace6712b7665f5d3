//! The implementations that execute the steps of a trace: the crate over a database, and the SQL
//! functions.

use std::{collections::HashMap, ops::DerefMut, time::Duration};

use sqlx::{AssertSqlSafe, Database, FromRow, Postgres, Row, pool::PoolConnection};
use tokio::task::JoinHandle;
use tower_fence::{
    AdmitError, Fence, FencedTx, LiveTokens, Resource, TokenUse,
    announce::{Announce, AnnounceError, LeaseDigest},
    epochs::partition_of,
    fence::{CommitError, WriteError},
};
use tower_fence_model::fence::writes::{Request, Who};

use crate::support::{
    database::{Fresh, TestDatabase},
    fence::token,
    functions,
};

/// The holder and the request to which a transaction belongs.
pub type Key = (Who, Request);

/// A refusal, with `max_token`.
#[derive(Debug, PartialEq)]
pub struct Stale(pub i64);

/// The operations of a real fence that the steps of the model need.
pub trait Real {
    type DB: TestDatabase;
    /// An open transaction that was admitted.
    type Open: DerefMut<Target = <Self::DB as Database>::Connection>;
    /// Whether this is the crate, not the SQL functions. With the functions, an announcement is a
    /// raise. If a function refuses a request, its effect on the row is rolled back with the
    /// transaction of the caller.
    const IS_CRATE: bool;

    fn database(&self) -> &Fresh<Self::DB>;

    async fn admit(
        &self,
        key: Key,
        resource: &Resource,
        token: i64,
        token_use: TokenUse,
    ) -> Result<Self::Open, Stale>;

    /// Commits. Returns whether the COMMIT was confirmed.
    async fn commit(&self, open: Self::Open) -> bool;

    async fn roll_back(&self, open: Self::Open);

    async fn raise(&self, resource: &Resource, token: i64) -> Result<(), Stale>;

    /// Raises the fence. Returns the open transaction, if it stays open, as with the functions.
    async fn open_raise(
        &self,
        resource: &Resource,
        token: i64,
    ) -> Result<Option<Self::Open>, Stale> {
        self.raise(resource, token).await.map(|()| None)
    }

    /// Removes at most ten idle rows of the partition of a resource. Keeps the rows that the tokens
    /// from `lowest` to `granted_up_to` need. Returns the number of removed rows, and the
    /// transaction if it stays open.
    async fn remove(
        &self,
        resource: &Resource,
        lowest: Option<i64>,
        granted_up_to: i64,
    ) -> (u64, Option<Self::Open>);

    async fn announce(&self, resource: &Resource, token: i64, who: Who) -> bool;

    async fn max_token(&self, resource: &Resource) -> Option<i64>;

    /// Starts a single statement, which may wait.
    fn write(&self, key: Key, what: SingleWrite) -> JoinHandle<SingleOutcome>;
}

/// Whether a single statement wrote; `None` if that is unknown.
pub type SingleOutcome = Option<Result<bool, Stale>>;

/// A single statement and its token.
pub struct SingleWrite {
    pub resource: Resource,
    pub token: i64,
    pub token_use: TokenUse,
    pub sql: String,
}

/// The crate. Each request uses a fence of its own, like a request to a process of its own.
pub struct Crate<DB: TestDatabase> {
    db: Fresh<DB>,
    fences: HashMap<Key, Fence<DB>>,
}

impl<DB: TestDatabase> Crate<DB> {
    pub async fn new() -> Self {
        let db = DB::fresh(8).await;
        let keys = Who::ALL.map(|who| Request::ALL.map(|request| (who, request)));
        let fences = keys.as_flattened().iter().map(|key| (*key, db.fence()));
        let fences = fences.collect();
        Self { db, fences }
    }

    /// Returns a fence whose queue has no writes.
    fn fence(&self) -> &Fence<DB> {
        &self.fences[&(Who::Stranger, Request::Again)]
    }
}

/// A row that a single statement returns.
struct Written;

impl<'r, R: Row> FromRow<'r, R> for Written {
    fn from_row(_: &'r R) -> sqlx::Result<Self> {
        Ok(Self)
    }
}

impl<DB: TestDatabase> Real for Crate<DB> {
    type DB = DB;
    type Open = FencedTx<DB>;
    const IS_CRATE: bool = true;

    fn database(&self) -> &Fresh<DB> {
        &self.db
    }

    async fn admit(
        &self,
        key: Key,
        resource: &Resource,
        presented: i64,
        token_use: TokenUse,
    ) -> Result<FencedTx<DB>, Stale> {
        let begun = self.fences[&key].begin(resource, token(presented), token_use);
        begun.await.map_err(stale)
    }

    async fn commit(&self, open: FencedTx<DB>) -> bool {
        open.commit().await.is_ok()
    }

    async fn roll_back(&self, open: FencedTx<DB>) {
        drop(open);
    }

    async fn raise(&self, resource: &Resource, presented: i64) -> Result<(), Stale> {
        let raised = self.fence().raise(resource, token(presented)).await;
        raised.map_err(stale)
    }

    async fn remove(
        &self,
        resource: &Resource,
        lowest: Option<i64>,
        granted_up_to: i64,
    ) -> (u64, Option<Self::Open>) {
        let mut live = LiveTokens::default();
        if let Some(lowest) = lowest {
            live.add(resource, token(lowest));
        }
        let live = live.granted_up_to(token(granted_up_to));
        let hour = Duration::from_secs(60 * 60);
        let removed = self.db.fence().remove_idle_below(hour, 10, &live).await;
        (removed.unwrap(), None)
    }

    async fn announce(&self, resource: &Resource, presented: i64, who: Who) -> bool {
        let lease = LeaseDigest::of(&format!("{who:?}"));
        let announced = self
            .fence()
            .announce(resource, token(presented), &lease, false);
        match announced.await {
            Ok(()) => true,
            Err(AnnounceError::Superseded { .. }) => false,
            Err(error) => panic!("{error:?}"),
        }
    }

    async fn max_token(&self, resource: &Resource) -> Option<i64> {
        // `inspect` would return the floor for a resource without a row.
        max_token_of_row(&self.db, resource).await
    }

    fn write(&self, key: Key, what: SingleWrite) -> JoinHandle<SingleOutcome> {
        let fence = self.fences[&key].clone();
        tokio::spawn(async move {
            let statement = AssertSqlSafe(what.sql);
            let written = fence.write(&what.resource, token(what.token), what.token_use, statement);
            match written.await.map(|rows: Vec<Written>| rows.len()) {
                Ok(rows) => Some(Ok(rows > 0)),
                Err(WriteError::Admit(error)) => Some(Err(stale(error))),
                Err(WriteError::Commit(CommitError::OutcomeUnknown(_))) => None,
                Err(error) => panic!("{error:?}"),
            }
        })
    }
}

fn stale(error: AdmitError) -> Stale {
    match error {
        AdmitError::Stale(stale) => Stale(stale.max_token),
        error => panic!("{error:?}"),
    }
}

/// The SQL functions, called as a program in another language calls them.
pub struct Functions {
    pub db: Fresh<Postgres>,
}

impl Functions {
    pub async fn new() -> Self {
        let db = Postgres::fresh(8).await;
        Self { db }
    }

    async fn begin(&self) -> PoolConnection<Postgres> {
        let mut conn = self.db.pool.acquire().await.unwrap();
        Postgres::run(&mut conn, "BEGIN").await;
        conn
    }
}

impl Real for Functions {
    type DB = Postgres;
    type Open = PoolConnection<Postgres>;
    const IS_CRATE: bool = false;

    fn database(&self) -> &Fresh<Postgres> {
        &self.db
    }

    async fn admit(
        &self,
        _: Key,
        resource: &Resource,
        presented: i64,
        token_use: TokenUse,
    ) -> Result<Self::Open, Stale> {
        let mut conn = self.begin().await;
        let admitted = match token_use {
            TokenUse::Reusable => {
                functions::admit_reusable(&mut conn, resource.as_str(), presented).await
            }
            _ => functions::admit(&mut conn, resource.as_str(), presented).await,
        };
        match admitted {
            Ok(_) => Ok(conn),
            Err(refused) => {
                self.roll_back(conn).await;
                Err(refusal(refused))
            }
        }
    }

    async fn commit(&self, mut open: Self::Open) -> bool {
        // COMMIT succeeds in an aborted transaction, but a statement before it fails.
        let is_sound = Postgres::execute(&mut open, "SELECT 1").await.is_ok();
        Postgres::execute(&mut open, "COMMIT").await.is_ok() && is_sound
    }

    async fn roll_back(&self, mut open: Self::Open) {
        Postgres::run(&mut open, "ROLLBACK").await;
    }

    async fn open_raise(
        &self,
        resource: &Resource,
        presented: i64,
    ) -> Result<Option<Self::Open>, Stale> {
        let mut conn = self.begin().await;
        match functions::raise(&mut conn, resource.as_str(), presented).await {
            Ok(_) => Ok(Some(conn)),
            Err(refused) => {
                self.roll_back(conn).await;
                Err(refusal(refused))
            }
        }
    }

    async fn remove(
        &self,
        resource: &Resource,
        lowest: Option<i64>,
        granted_up_to: i64,
    ) -> (u64, Option<Self::Open>) {
        let mut conn = self.begin().await;
        let partition = partition_of(resource);
        let live = lowest.map_or("NULL".to_owned(), |live| live.to_string());
        let remove = format!(
            "SELECT tower_fence.remove_idle_of({partition}::smallint, '1 hour', 10, {granted_up_to}, {live})::bigint"
        );
        let removed = Postgres::number(&mut conn, &remove).await.unwrap();
        (removed.unsigned_abs(), Some(conn))
    }

    async fn raise(&self, resource: &Resource, presented: i64) -> Result<(), Stale> {
        let mut conn = self.db.pool.acquire().await.unwrap();
        let raised = functions::raise(&mut conn, resource.as_str(), presented).await;
        raised.map(drop).map_err(refusal)
    }

    async fn announce(&self, resource: &Resource, presented: i64, _: Who) -> bool {
        self.raise(resource, presented).await.is_ok()
    }

    async fn max_token(&self, resource: &Resource) -> Option<i64> {
        let mut conn = self.db.pool.acquire().await.unwrap();
        let found = functions::max_token(&mut conn, resource.as_str()).await;
        if let Some(found) = found.unwrap() {
            return Some(found);
        }
        // The function also returns null for a row that has no stale token yet.
        let row = max_token_of_row(&self.db, resource).await;
        assert!(matches!(row, None | Some(0)), "{resource}: {row:?}");
        row
    }

    fn write(&self, _: Key, _: SingleWrite) -> JoinHandle<SingleOutcome> {
        unreachable!("check and write are two statements there")
    }
}

/// Returns a refusal. Fails like `unwrap` if the function failed otherwise, which proves nothing
/// about a trace.
fn refusal(refused: functions::Refused) -> Stale {
    assert_eq!(refused.code, "TF412", "unwrap() on {refused:?}");
    Stale(refused.problem["max_token"].as_i64().unwrap())
}

/// Returns `max_token` in the row of a resource, if there is a row.
pub async fn max_token_of_row<DB: TestDatabase>(db: &Fresh<DB>, name: &Resource) -> Option<i64> {
    let row = format!("SELECT max_token FROM tower_fence.resources WHERE resource = '{name}'");
    let mut conn = db.pool.acquire().await.unwrap();
    DB::number(&mut conn, &row).await.ok()
}

/// Returns the stock of a resource, to which the handlers write.
pub async fn stock<DB: TestDatabase>(db: &Fresh<DB>, name: &Resource) -> i64 {
    let n = format!("SELECT n FROM stock WHERE sku = '{name}'");
    db.number(&n).await
}
