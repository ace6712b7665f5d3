//! Writers while shards move, sessions of the coordinator are terminated, and a worker is killed
//! and restarted.
//!
//! Each write takes one item from the stock, and adds an entry with its token and the stock that it
//! found. After a failure, a writer retries with the same token. Afterwards every acknowledged
//! token has exactly one entry, no other token has more than one, the stock agrees with the
//! entries, and the tokens of a resource are in the order of its writes.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicI64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, Postgres, Row};
use tower_fence::{AdmitError, Fence, TokenUse, fence::CommitError};

use super::distributed::{resource, token};
use crate::support::{
    citus::{Cluster, STOCK},
    database::TestDatabase,
    eventually,
    postgres::PostgresServer,
};

const RESOURCES: usize = 5;
const WRITERS: usize = 8;
/// The number of rounds, each with a move of a shard and a failure.
const ROUNDS: usize = 8;
/// The number of moves that must succeed, and the time for further rounds that only repeat moves.
const MOVES: usize = 4;
const FOR_MOVES: Duration = Duration::from_secs(120);

/// The outcome of one attempt, as the writer sees it.
enum Attempt {
    Acknowledged,
    /// The token is stale, and so are all tokens up to this one.
    Stale(i64),
    NotWritten,
    Unknown,
}

/// The way in which tokens are checked.
#[derive(Clone)]
enum Check {
    Fence(Fence<Postgres>),
    /// A plain table of the coordinator, which is not in the metadata of Citus.
    PlainTable(PgPool),
}

impl Check {
    async fn attempt(&self, number: usize, value: i64) -> Attempt {
        match self {
            Self::Fence(fence) => with_fence(fence, number, value).await,
            Self::PlainTable(pool) => with_plain_table(pool, number, value)
                .await
                .unwrap_or(Attempt::Unknown),
        }
    }
}

async fn with_fence(fence: &Fence<Postgres>, number: usize, value: i64) -> Attempt {
    let name = resource(number);
    let begun = fence.begin(&name, token(value), TokenUse::SingleUse);
    let mut tx = match begun.await {
        Ok(tx) => tx,
        Err(AdmitError::Stale(stale)) => return Attempt::Stale(stale.max_token),
        Err(AdmitError::Busy(_) | AdmitError::Unavailable(_)) => return Attempt::NotWritten,
        Err(error) => panic!("{error:?}"),
    };
    if write(&mut tx, number, value).await.is_err() {
        return Attempt::NotWritten;
    }
    match tx.commit().await {
        Ok(()) => Attempt::Acknowledged,
        Err(CommitError::OutcomeUnknown(_)) => Attempt::Unknown,
        Err(_) => Attempt::NotWritten,
    }
}

async fn with_plain_table(pool: &PgPool, number: usize, value: i64) -> sqlx::Result<Attempt> {
    let mut tx = pool.begin().await?;
    let admitted =
        sqlx::query("UPDATE tokens SET max_token = $2 WHERE resource = $1 AND max_token < $2")
            .bind(resource(number).as_str())
            .bind(value)
            .execute(&mut *tx)
            .await?;
    if admitted.rows_affected() == 0 {
        return Ok(Attempt::Stale(value));
    }
    write(&mut tx, number, value).await?;
    tx.commit().await?;
    Ok(Attempt::Acknowledged)
}

async fn write(conn: &mut PgConnection, number: usize, value: i64) -> sqlx::Result<()> {
    let left: i64 = sqlx::query_scalar("UPDATE inventory SET n = n - 1 WHERE sku = $1 RETURNING n")
        .bind(resource(number).as_str())
        .fetch_one(&mut *conn)
        .await?;
    sqlx::query("INSERT INTO entries (sku, token, n) VALUES ($1, $2, $3)")
        .bind(resource(number).as_str())
        .bind(value)
        .bind(left)
        .execute(conn)
        .await?;
    Ok(())
}

/// For each resource and token, whether the write was acknowledged, and whether it may be applied.
type Ledger = Arc<Mutex<HashMap<(usize, i64), (bool, bool)>>>;

async fn run_writer(check: Check, ledger: Ledger, next: Arc<[AtomicI64]>, ended: Arc<AtomicBool>) {
    while !ended.load(SeqCst) {
        let number = rand::random_range(0..RESOURCES);
        let value = next[number].fetch_add(1, SeqCst) + 1;
        // This pause lets other writers overtake this one.
        tokio::time::sleep(Duration::from_millis(rand::random_range(0..8))).await;
        // Repeats the attempt, because a server may be starting.
        for _ in 0..200 {
            match check.attempt(number, value).await {
                Attempt::Acknowledged => {
                    let mut ledger = ledger.lock().unwrap();
                    let known = ledger.entry((number, value)).or_default();
                    assert!(!known.0, "{number}: {value} was acknowledged twice");
                    *known = (true, true);
                    break;
                }
                Attempt::Stale(max_token) => {
                    next[number].fetch_max(max_token, SeqCst);
                    break;
                }
                Attempt::NotWritten => {}
                Attempt::Unknown => {
                    ledger.lock().unwrap().entry((number, value)).or_default().1 = true;
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Terminates some sessions of the writers while they commit.
async fn end_sessions(cluster: &Cluster) {
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_millis(150)).await;
        let end = "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity \
             WHERE backend_type = 'client backend' AND application_name = 'writer' \
             ORDER BY state = 'active' AND query LIKE '%COMMIT%' DESC, random() LIMIT 2) AS some";
        let _ = cluster.try_execute(end).await;
    }
}

async fn crash(server: &mut PostgresServer) {
    server.crash().await;
    server.restart().await;
}

/// Crashes the coordinator while writers wait until their COMMIT is on disk. Their workers have
/// committed by then.
async fn crash_in_commits(cluster: &mut Cluster) {
    let in_commit = "SELECT count(*) FROM pg_stat_activity \
         WHERE application_name = 'writer' AND state = 'active' AND query LIKE '%COMMIT%'";
    eventually("writers commit", async || {
        cluster.read::<i64>(in_commit).await >= 2
    })
    .await;
    crash(&mut cluster.coordinator).await;
}

/// Runs writers with this check while shards move, sessions end and servers crash. Returns the
/// faults found afterwards, and the number of acknowledged writes.
async fn faults_of(cluster: &mut Cluster, check: Check) -> (Vec<String>, usize) {
    // Delays the flush of the coordinator's own COMMIT after the workers have committed.
    cluster
        .execute(
            "ALTER SYSTEM SET commit_delay = 100000; ALTER SYSTEM SET commit_siblings = 0; SELECT pg_reload_conf(); \
             CREATE TABLE entries (sku text COLLATE \"C\", token bigint, n bigint); \
             SELECT create_distributed_table('entries', 'sku', colocate_with => 'inventory')",
        )
        .await;
    let (ledger, ended) = (Ledger::default(), Arc::new(AtomicBool::new(false)));
    let next: Arc<[AtomicI64]> = (0..RESOURCES)
        .map(|_| AtomicI64::new(1_000_000_000))
        .collect();
    let writers: Vec<_> = (0..WRITERS)
        .map(|_| {
            let (ledger, next, ended) =
                (Arc::clone(&ledger), Arc::clone(&next), Arc::clone(&ended));
            tokio::spawn(run_writer(check.clone(), ledger, next, ended))
        })
        .collect();
    let began = Instant::now();
    let (mut moves, mut rounds) = (0, 0);
    while rounds < ROUNDS || (moves < MOVES && began.elapsed() < FOR_MOVES) {
        let sku = format!("sku-{}", rand::random_range(0..RESOURCES));
        let to = 1 - cluster.worker_of(&sku).await;
        let (moved, ()) = tokio::join!(cluster.try_move_shard(&sku, to), end_sessions(cluster));
        match moved {
            Ok(()) => moves += 1,
            Err(error) => println!("{sku} was not moved: {error}"),
        }
        rounds += 1;
        // If a move and a write wait for each other, Citus often cancels the move. The rounds that
        // only repeat moves are short.
        match rounds % 4 {
            _ if rounds > ROUNDS => {}
            0 => {}
            2 => crash(&mut cluster.workers[0]).await,
            _ => crash_in_commits(cluster).await,
        }
    }
    ended.store(true, SeqCst);
    for writer in writers {
        writer.await.unwrap();
    }
    assert!(
        moves >= MOVES,
        "{moves} shards have moved in {rounds} rounds"
    );
    settle(cluster).await;
    let ledger = std::mem::take(&mut *ledger.lock().unwrap());
    let acknowledged = ledger
        .values()
        .filter(|(acknowledged, _)| *acknowledged)
        .count();
    (compare(cluster, &ledger).await, acknowledged)
}

/// Waits until no two-phase transaction is in doubt.
async fn settle(cluster: &Cluster) {
    eventually("prepared transactions are resolved", async || {
        cluster
            .execute("SELECT recover_prepared_transactions()")
            .await;
        let mut left = 0;
        for worker in &cluster.workers {
            let mut conn = worker.connect().await;
            let prepared = "SELECT count(*) FROM pg_prepared_xacts";
            let prepared = Postgres::number(&mut conn, prepared).await.unwrap();
            left += prepared;
            conn.close().await.unwrap();
        }
        left == 0
    })
    .await;
}

async fn compare(cluster: &Cluster, ledger: &HashMap<(usize, i64), (bool, bool)>) -> Vec<String> {
    let mut faults = vec![];
    let mut conn = cluster.connect().await;
    for number in 0..RESOURCES {
        let sql =
            format!("SELECT token, n FROM entries WHERE sku = 'sku-{number}' ORDER BY n DESC");
        let rows = sqlx::raw_sql(AssertSqlSafe(sql))
            .fetch_all(&mut conn)
            .await
            .unwrap();
        let entries: Vec<(i64, i64)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        let stock: i64 = cluster
            .read(&format!(
                "SELECT n FROM inventory WHERE sku = 'sku-{number}'"
            ))
            .await;
        if STOCK - stock != entries.len() as i64 {
            faults.push(format!(
                "{number}: {} entries, and the stock is {stock}",
                entries.len()
            ));
        }
        for pair in entries.windows(2) {
            if pair[0].0 >= pair[1].0 || pair[0].1 - 1 != pair[1].1 {
                faults.push(format!(
                    "{number}: {:?} comes before {:?}",
                    pair[0], pair[1]
                ));
            }
        }
        for (&(_, value), &(acknowledged, possible)) in
            ledger.iter().filter(|((of, _), _)| *of == number)
        {
            let count = entries.iter().filter(|(token, _)| *token == value).count();
            if (acknowledged && count != 1) || count > usize::from(possible) {
                faults.push(format!(
                    "{number}: {value} has {count} entries, acknowledged: {acknowledged}"
                ));
            }
        }
    }
    faults
}

async fn writers_pool(cluster: &Cluster) -> PgPool {
    let url = format!(
        "{}?application_name=writer",
        cluster.coordinator.url("postgres")
    );
    PgPool::connect(&url).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_survive_shard_moves_and_server_failures() {
    let mut cluster = Cluster::with_distributed_fence().await;
    cluster
        .execute("SELECT tower_fence.next_epoch(number::smallint, 1) FROM generate_series(0, 255) AS number")
        .await;
    let fence = Fence::new(writers_pool(&cluster).await);
    let (faults, acknowledged) = faults_of(&mut cluster, Check::Fence(fence.clone())).await;
    assert_eq!(faults, [""; 0]);
    assert!(acknowledged > 200, "{acknowledged}");
    println!("{acknowledged} writes were acknowledged");
    for number in 0..RESOURCES {
        let last =
            format!("SELECT coalesce(max(token), 0) FROM entries WHERE sku = 'sku-{number}'");
        let max_token = fence.inspect(&resource(number)).await.unwrap();
        assert!(max_token >= Some(cluster.read::<i64>(&last).await));
    }
}

/// The same writers, whose tokens are checked in a plain table of the coordinator.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_table_on_the_coordinator_repeats_writes() {
    let mut cluster = Cluster::start().await;
    cluster.make_inventory().await;
    cluster
        .execute(
            "CREATE TABLE tokens (resource text PRIMARY KEY, max_token bigint NOT NULL); \
             INSERT INTO tokens SELECT 'sku-' || number, 0 FROM generate_series(0, 9) AS number",
        )
        .await;
    let plain = Check::PlainTable(writers_pool(&cluster).await);
    // A write is repeated only if its writer retries after the crash before a writer with a higher
    // token does.
    for _ in 0..5 {
        let (faults, acknowledged) = faults_of(&mut cluster, plain.clone()).await;
        println!("{acknowledged} writes were acknowledged: {faults:?}");
        if !faults.is_empty() {
            return;
        }
        cluster
            .execute("DROP TABLE entries; UPDATE tokens SET max_token = 0")
            .await;
        cluster
            .execute(&format!("UPDATE inventory SET n = {STOCK}"))
            .await;
    }
    panic!("no write was repeated");
}
