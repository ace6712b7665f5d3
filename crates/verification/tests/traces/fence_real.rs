//! The implementations that execute the steps of a trace: the crate over a database, and the SQL
//! functions.

use std::{collections::HashMap, ops::DerefMut};

use sqlx::{
    AssertSqlSafe, Connection, Database, PgConnection, Postgres, Sqlite, pool::PoolConnection,
    query,
};
use tokio::task::JoinHandle;
use tower_fence::{
    AdmitError, Fence, FencedTx, Resource, TokenUse,
    announce::{Announce, AnnounceError, LeaseDigest},
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

    /// Executes a statement. Returns whether it succeeded.
    async fn execute(&self, open: &mut Self::Open, sql: &str) -> bool {
        Self::DB::execute(open, sql).await.is_ok()
    }

    /// Reads one number.
    async fn number(&self, open: &mut Self::Open, sql: &str) -> i64 {
        Self::DB::number(open, sql).await.unwrap()
    }

    /// Commits. Returns whether the COMMIT was confirmed.
    async fn commit(&self, open: Self::Open) -> bool;

    async fn roll_back(&self, open: Self::Open);

    async fn raise(&self, resource: &Resource, token: i64) -> Result<(), Stale>;

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

/// A single statement of the crate. This is a trait because the types of a statement depend on the
/// database.
pub trait Writes: TestDatabase {
    fn write(
        fence: Fence<Self>,
        what: SingleWrite,
    ) -> impl Future<Output = Result<Vec<(i64,)>, WriteError>> + Send;
}

macro_rules! writes {
    ($($database:ty),*) => {
        $(impl Writes for $database {
            async fn write(
                fence: Fence<Self>,
                what: SingleWrite,
            ) -> Result<Vec<(i64,)>, WriteError> {
                let statement = query(AssertSqlSafe(what.sql));
                fence.write(&what.resource, token(what.token), what.token_use, statement).await
            }
        })*
    };
}

writes!(Postgres, Sqlite);

impl<DB: Writes> Real for Crate<DB> {
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
        let row =
            format!("SELECT max_token FROM tower_fence.resources WHERE resource = '{resource}'");
        let found = DB::number(&mut self.db.pool.acquire().await.unwrap(), &row).await;
        found.ok()
    }

    fn write(&self, key: Key, what: SingleWrite) -> JoinHandle<SingleOutcome> {
        let written = DB::write(self.fences[&key].clone(), what);
        tokio::spawn(async move {
            match written.await {
                Ok(rows) => Some(Ok(!rows.is_empty())),
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
        let mut conn = self.db.pool.acquire().await.unwrap();
        run(&mut conn, "BEGIN").await;
        let admitted = match token_use {
            TokenUse::Reusable => {
                functions::admit_reusable(&mut conn, resource.as_str(), presented).await
            }
            _ => functions::admit(&mut conn, resource.as_str(), presented).await,
        };
        match admitted {
            Ok(_) => Ok(conn),
            Err(refused) => {
                run(&mut conn, "ROLLBACK").await;
                Err(refusal(refused))
            }
        }
    }

    async fn commit(&self, mut open: Self::Open) -> bool {
        // COMMIT succeeds in an aborted transaction, but a statement before it fails.
        let is_sound = open.ping().await.is_ok() && self.execute(&mut open, "SELECT 1").await;
        self.execute(&mut open, "COMMIT").await && is_sound
    }

    async fn roll_back(&self, mut open: Self::Open) {
        run(&mut open, "ROLLBACK").await;
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
        let row =
            format!("SELECT max_token FROM tower_fence.resources WHERE resource = '{resource}'");
        let row = Postgres::number(&mut conn, &row).await.ok();
        assert!(matches!(row, None | Some(0)), "{resource}: {row:?}");
        row
    }

    fn write(&self, _: Key, _: SingleWrite) -> JoinHandle<SingleOutcome> {
        unreachable!("check and write are two statements there")
    }
}

pub fn refusal(refused: functions::Refused) -> Stale {
    assert_eq!(refused.code, "TF412", "{refused:?}");
    Stale(refused.problem["max_token"].as_i64().unwrap())
}

async fn run(conn: &mut PgConnection, sql: &str) {
    Postgres::execute(conn, sql).await.unwrap();
}
