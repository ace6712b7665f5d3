//! Rows that are removed all the time, while fresh, current and dead tokens are presented.

use std::{
    sync::atomic::{AtomicBool, AtomicI64, Ordering::SeqCst},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use sqlx::{Connection, PgConnection, Postgres};
use tokio::time::sleep;
use tower_fence::{AdmitError, Fence, Resource, TokenUse};

use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    fence::token,
    functions,
};

on_both_databases!(no_dead_token_is_admitted_while_rows_are_removed);

const WRITERS: usize = 6;
/// By each writer at least.
const ATTEMPTS: usize = 150;
/// How long writers go on at most until everything has happened often enough.
const ENOUGH_WITHIN: Duration = Duration::from_secs(60);

/// A resource, and the highest token that was dead when a write to it was answered.
struct Written {
    resource: Resource,
    dead: AtomicI64,
}

struct Load {
    /// All in one partition.
    written: Vec<Written>,
    next: AtomicI64,
    done: AtomicBool,
    counts: Counts,
}

/// Of all writers and the remover.
#[derive(Debug, Default)]
struct Counts {
    fresh: AtomicI64,
    current: AtomicI64,
    refused: AtomicI64,
    removed: AtomicI64,
    /// Dead tokens that were admitted.
    revived: AtomicI64,
}

impl Counts {
    fn are_enough(&self) -> bool {
        self.fresh.load(SeqCst) > 50
            && self.refused.load(SeqCst) > 50
            && self.current.load(SeqCst) > 0
            && self.removed.load(SeqCst) > 20
    }

    fn revived(&self) -> i64 {
        self.revived.load(SeqCst)
    }
}

/// One request: whether it was admitted, and committed.
trait Writer {
    async fn write(&mut self, resource: &Resource, value: i64, token_use: TokenUse) -> bool;
}

impl Load {
    fn new() -> Self {
        let names = [
            "sku-1", "sku-124", "sku-378", "sku-456", "sku-821", "sku-1047",
        ];
        let written = names.map(|name| Written {
            resource: Resource::new(name).unwrap(),
            dead: AtomicI64::new(0),
        });
        Self {
            written: written.into(),
            next: AtomicI64::new(1),
            done: AtomicBool::new(false),
            counts: Counts::default(),
        }
    }

    async fn run(&self, mut writer: impl Writer) {
        let counts = &self.counts;
        let begun = Instant::now();
        // The last token of each resource that may write again.
        let mut current = vec![None; self.written.len()];
        let mut attempts = 0;
        while attempts < ATTEMPTS || (!counts.are_enough() && begun.elapsed() < ENOUGH_WITHIN) {
            attempts += 1;
            let place = rand::random_range(0..self.written.len());
            let Written { resource, dead } = &self.written[place];
            let (value, token_use, count) = match (rand::random_range(0..4), current[place]) {
                (0, Some(value)) => (value, TokenUse::Reusable, &counts.current),
                (1, _) => (
                    rand::random_range(0..=dead.load(SeqCst)).max(1),
                    TokenUse::SingleUse,
                    &counts.fresh,
                ),
                (2, _) => {
                    let value = self.next.fetch_add(1, SeqCst);
                    current[place] = Some(value);
                    (value, TokenUse::Reusable, &counts.fresh)
                }
                _ => (
                    self.next.fetch_add(1, SeqCst),
                    TokenUse::SingleUse,
                    &counts.fresh,
                ),
            };
            let known_dead = dead.load(SeqCst);
            if !writer.write(resource, value, token_use).await {
                counts.refused.fetch_add(1, SeqCst);
                continue;
            }
            count.fetch_add(1, SeqCst);
            counts
                .revived
                .fetch_add(i64::from(value <= known_dead), SeqCst);
            let dies = match token_use {
                TokenUse::SingleUse => value,
                TokenUse::Reusable => value - 1,
            };
            dead.fetch_max(dies, SeqCst);
        }
    }

    /// Removes rows until the writers are done.
    async fn remove(&self, some: impl AsyncFn() -> i64) {
        while !self.done.load(SeqCst) {
            self.counts.removed.fetch_add(some().await, SeqCst);
        }
    }
}

/// Removes rows of the partition, and takes its time before COMMIT.
async fn remove_slowly(db: &Fresh<Postgres>) -> i64 {
    let mut tx = db.pool.begin().await.unwrap();
    let remove = "SELECT fence_remove_idle_of(110::smallint, '0', 100, NULL, NULL)::bigint";
    let removed = Postgres::number(&mut tx, remove).await.unwrap();
    sleep(Duration::from_millis(1)).await;
    tx.commit().await.unwrap();
    removed
}

/// The counts of all writers, while rows are removed.
async fn counts_of<W: Writer>(
    remove: impl AsyncFn() -> i64,
    writer: impl AsyncFn(usize) -> W,
) -> Counts {
    let load = Load::new();
    let writers = async {
        join_all((0..WRITERS).map(async |n| load.run(writer(n).await).await)).await;
        load.done.store(true, SeqCst);
    };
    tokio::join!(writers, load.remove(remove));
    println!("{:?}", load.counts);
    assert!(load.counts.are_enough(), "{:?}", load.counts);
    load.counts
}

/// Through the crate, sometimes with a second resource.
struct Crate<DB: TestDatabase>(Fence<DB>);

impl<DB: TestDatabase> Writer for Crate<DB> {
    async fn write(&mut self, resource: &Resource, value: i64, token_use: TokenUse) -> bool {
        let mut tokens = vec![(resource.clone(), token(value))];
        if rand::random_bool(0.3) {
            // New each time, in any partition: a much higher token would close those with one of its own.
            let other = format!("other-{value}-{}", rand::random::<u32>());
            tokens.push((Resource::new(other).unwrap(), token(value)));
        }
        match self.0.begin_all(&tokens, token_use).await {
            Ok(tx) => {
                tx.commit().await.unwrap();
                true
            }
            Err(AdmitError::Stale(_)) => false,
            Err(error) => panic!("{error:?}"),
        }
    }
}

async fn no_dead_token_is_admitted_while_rows_are_removed<DB: TestDatabase>() {
    let db = DB::fresh(WRITERS as u32 + 1).await;
    let remover = db.fence();
    let remove = async || remover.remove_idle(Duration::ZERO, 100).await.unwrap() as i64;
    let counts = counts_of(remove, async |_| Crate(db.fence())).await;
    assert_eq!(counts.revived(), 0, "{counts:?}");
}

/// Half of the writers through the functions.
enum Mixed {
    Crate(Crate<Postgres>),
    Functions(PgConnection),
}

impl Writer for Mixed {
    async fn write(&mut self, resource: &Resource, value: i64, token_use: TokenUse) -> bool {
        let conn = match self {
            Self::Crate(writer) => return writer.write(resource, value, token_use).await,
            Self::Functions(conn) => conn,
        };
        let admitted = match token_use {
            TokenUse::SingleUse => functions::admit(conn, resource.as_str(), value).await,
            TokenUse::Reusable => functions::admit_reusable(conn, resource.as_str(), value).await,
        };
        if admitted.is_err() {
            functions::is_refused(admitted, "TF412");
            return false;
        }
        true
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_dead_token_is_admitted_by_the_functions_while_rows_are_removed() {
    let db = Postgres::fresh(WRITERS as u32 + 1).await;
    let writer = async |n: usize| {
        if n.is_multiple_of(2) {
            Mixed::Crate(Crate(db.fence()))
        } else {
            Mixed::Functions(PgConnection::connect(&db.url).await.unwrap())
        }
    };
    let counts = counts_of(async || remove_slowly(&db).await, writer).await;
    assert_eq!(counts.revived(), 0, "{counts:?}");
}

/// One statement that reads the floor without a lock.
struct Naive(PgConnection);

impl Writer for Naive {
    async fn write(&mut self, resource: &Resource, value: i64, token_use: TokenUse) -> bool {
        const ADMIT: &str = "INSERT INTO fence_resources AS f (resource, max_token, partition) \
            SELECT $1, $3, fence_partition($1) WHERE $2 > (SELECT floor FROM fence_floors \
                WHERE partition = fence_partition($1)) \
            ON CONFLICT (resource) DO UPDATE SET max_token = excluded.max_token, \
                updated_at = CURRENT_TIMESTAMP WHERE f.max_token < $2";
        let dies = match token_use {
            TokenUse::SingleUse => value,
            TokenUse::Reusable => value - 1,
        };
        let admitted = sqlx::query(ADMIT)
            .bind(resource.as_str())
            .bind(value)
            .bind(dies)
            .execute(&mut self.0);
        admitted.await.unwrap().rows_affected() == 1
    }
}

/// The same load finds those who read the floor before they wait for a removal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_floor_that_is_read_without_a_lock_is_caught_under_load() {
    let db = Postgres::fresh(2).await;
    for _ in 0..10 {
        let naive = async |_| Naive(PgConnection::connect(&db.url).await.unwrap());
        let remove = async || remove_slowly(&db).await;
        if counts_of(remove, naive).await.revived() > 0 {
            return;
        }
    }
    panic!("the load did not find the broken statement: it proves nothing");
}
