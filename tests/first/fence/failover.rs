//! A fence on a database that reports a promotion or a restore: tokens whose grants the database
//! may have lost are stale.

use std::time::Duration;

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, request::Parts},
    routing::post,
};
use sqlx::Postgres;
use tower::ServiceExt;
use tower_fence::{
    AdmitError, Fence, FenceLayer, FencedTx, Idempotency, LiveTokens, Resource, Token, TokenUse,
    announce::{Announce, AnnounceError, LeaseDigest},
    epochs::{Epoch, Epochs},
    fence::WriteError,
    lease::{Acquire, Lease, LeaseError, Leases, MemoryLeases, PostgresLeases, Renew},
};

use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    eventually,
    fence::{refuses, resource, sku, token, use_up, write},
    functions,
    lease::{LONG, grant, is_misconfigured},
    redis::{connect_shared, fresh_prefix},
};

on_both_databases!(
    granted_tokens_are_stale_after_a_failover,
    tokens_of_other_issuers_survive_a_failover,
    issuer_learns_that_its_epoch_has_ended,
);

/// The partition of `sku-1`.
pub(super) const PARTITION: u8 = 0x6e;

/// The last token of epoch 1,001: the highest stale token after one promotion in epoch 1.
pub(super) const HIGHEST_STALE: i64 = 1_001_999_999_999;

/// The last token of epoch 501: the highest stale token after one `after_failover` call of an
/// operator.
pub(super) const HIGHEST_STALE_BY_OPERATOR: i64 = 501_999_999_999;

/// Returns a database with epoch 1 assigned in the partition of `sku-1`, in which a client has
/// written with token 1,000,000,005.
pub(super) async fn in_epoch_1<DB: TestDatabase>() -> (Fresh<DB>, Fence<DB>) {
    let db = DB::fresh(4).await;
    let fence = db.fence();
    fence.next_epoch(PARTITION, Epoch::FIRST).await.unwrap();
    write(&fence, 1_000_000_005).await.unwrap();
    (db, fence)
}

/// Sets the timeline of all rows, as if the server had been on this timeline until now.
pub(super) async fn was_on_timeline(db: &Fresh<Postgres>, timeline: &str) {
    db.execute(&format!(
        "UPDATE tower_fence.resources SET history = '{timeline}'; \
         UPDATE tower_fence.floors SET history = '{timeline}', unchanged_histories = ARRAY['{timeline}']"
    ))
    .await;
}

/// Makes `current_history` return this timeline from now on.
pub(super) async fn is_on_timeline(db: &Fresh<Postgres>, timeline: &str) {
    db.execute(&format!(
        "CREATE OR REPLACE FUNCTION tower_fence.current_history() RETURNS text LANGUAGE sql AS $$ SELECT '{timeline}' $$"
    ))
    .await;
}

async fn granted_tokens_are_stale_after_a_failover<DB: TestDatabase>() {
    let (db, fence) = in_epoch_1::<DB>().await;
    assert!(fence.after_failover().await.unwrap());
    let highest_stale = HIGHEST_STALE_BY_OPERATOR;
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(highest_stale));
    refuses(&fence, 1_000_000_006, highest_stale).await;
    // The grant of this token may have been lost in the failover.
    refuses(&db.fence(), highest_stale, highest_stale).await;
    // This resource of the same partition has no row. Its token is refused as well, because the row
    // of an admitted write may be lost.
    let refused = use_up(&fence, &in_the_same_partition(), token(1_000_000_007)).await;
    assert_matches!(&refused, Err(AdmitError::Stale(stale))
        if stale.max_token == highest_stale && stale.by_floor);
    let next = fence.next_epoch(PARTITION, Epoch::FIRST).await.unwrap();
    assert_eq!(next, Epoch::new(502).unwrap());
    write(&fence, 502_000_000_001).await.unwrap();
}

/// Returns another resource in the partition of `sku-1`.
pub(super) fn in_the_same_partition() -> Resource {
    let mut names = (2..).map(|n| format!("sku-{n}"));
    let same = names.find(|name| crc32fast::hash(name.as_bytes()).to_le_bytes()[0] == PARTITION);
    resource(&same.unwrap())
}

async fn tokens_of_other_issuers_survive_a_failover<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    write(&fence, 5).await.unwrap();
    assert!(!fence.after_failover().await.unwrap());
    write(&fence, 6).await.unwrap();
    // If this database assigns epochs as well, a failover makes these tokens stale.
    fence.next_epoch(PARTITION, Epoch::FIRST).await.unwrap();
    assert!(fence.after_failover().await.unwrap());
    refuses(&fence, 7, HIGHEST_STALE_BY_OPERATOR).await;
}

/// A dump contains the timeline of its server, which may differ from that of the new server by any
/// number.
#[tokio::test]
async fn a_restored_dump_does_not_use_up_the_epochs() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    was_on_timeline(&db, "1500000001").await;
    is_on_timeline(&db, "15000004B0").await;
    fence.after_failover().await.unwrap();
    let next = fence.next_epoch(PARTITION, Epoch::FIRST).await.unwrap();
    assert_eq!(next, Epoch::new(100_502).unwrap());
}

/// In a restored database, a new transaction may have the id of an earlier one that was admitted.
#[tokio::test]
async fn earlier_admissions_are_forgotten_after_a_restore() {
    let db = Postgres::fresh(1).await;
    write(&db.fence(), 5).await.unwrap();
    let admitted = "SELECT count(admitted_by) FROM tower_fence.resources";
    assert_eq!(db.number(admitted).await, 1);
    db.fence().after_failover().await.unwrap();
    assert_eq!(db.number(admitted).await, 0);
}

/// At a stricter isolation level, the call would not see a resource whose first write is committed
/// during the call. Older tokens of that resource would stay valid. A reset would not see an epoch
/// that has begun.
#[tokio::test]
async fn operators_call_functions_at_read_committed_only() {
    let db = Postgres::fresh(1).await;
    let mut conn = db.pool.acquire().await.unwrap();
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        for call in ["after_failover()", "reset('sku-1', 3)"] {
            let sql = format!("SET TRANSACTION ISOLATION LEVEL {level}; SELECT tower_fence.{call}");
            functions::refuses(&mut conn, &sql, "25000").await;
        }
    }
}

async fn issuer_learns_that_its_epoch_has_ended<DB: TestDatabase>() {
    let (_db, fence) = in_epoch_1::<DB>().await;
    let seen = Epoch::new(7).unwrap();
    assert_eq!(fence.report_epoch(PARTITION, seen).await.unwrap(), seen);
    fence.after_failover().await.unwrap();
    let alive = fence.report_epoch(PARTITION, seen).await.unwrap();
    assert_eq!(alive, Epoch::new(508).unwrap());
    let begun = fence.next_epoch(PARTITION, alive).await.unwrap();
    assert_eq!(fence.report_epoch(PARTITION, begun).await.unwrap(), begun);
}

/// All ways to write.
const WAYS: [&str; 7] = [
    "begin",
    "begin early",
    "several",
    "one statement",
    "a transaction of the caller's",
    "the function",
    "under a key",
];

/// Returns a database with epoch 1 assigned. A client has written with token 1,000,000,005 to one
/// resource for each of [`WAYS`].
async fn ways_in_epoch_1() -> Fresh<Postgres> {
    let db = Postgres::fresh(4).await;
    let set_up = "CREATE TABLE log (token bigint); INSERT INTO tower_fence.epochs SELECT generate_series(0, 255), 1";
    db.execute(set_up).await;
    for way in WAYS {
        let first = use_up(&db.fence(), &resource(way), token(1_000_000_005)).await;
        first.unwrap();
    }
    db
}

/// Returns a resource that has no row. Its name begins with this text.
fn another(start: &str) -> Resource {
    resource(&format!("{start}{:x}", rand::random::<u128>()))
}

/// Writes in one of [`WAYS`], to the resource of that name. A refusal returns the highest stale
/// token.
async fn attempt(db: &Fresh<Postgres>, way: &'static str, value: i64) -> Result<(), i64> {
    let (name, presented) = (resource(way), token(value));
    let stale = |error: AdmitError| match error {
        AdmitError::Stale(stale) => stale.max_token,
        other => panic!("{way}: {other:?}"),
    };
    let fence = match way {
        "begin early" => db.reusing_fence(),
        _ => db.fence(),
    };
    match way {
        "begin" | "begin early" => {
            // If connections are reused, the end of this transaction begins the next one.
            let first = use_up(&fence, &another(""), token(999_000_000_000_000)).await;
            first.unwrap();
            use_up(&fence, &name, presented).await.map_err(stale)?;
        }
        "several" => {
            // The row of the other resource is already on this timeline. Its name sorts before or
            // after that of this resource.
            let start = if rand::random() { "a" } else { "z" };
            let (other, used) = (another(start), 998_000_000_000_000);
            use_up(&fence, &other, token(used)).await.unwrap();
            let tokens = [(other.clone(), token(used + 1)), (name, presented)];
            let tx = fence.begin_all(&tokens, TokenUse::SingleUse).await;
            if tx.is_err() {
                assert_eq!(db.fence().inspect(&other).await.unwrap(), Some(used));
            }
            tx.map_err(stale)?.commit().await.unwrap();
        }
        "one statement" => {
            let insert = "INSERT INTO log SELECT $1 FROM fence RETURNING token";
            let insert = sqlx::query(insert).bind(value);
            let written = fence.write(&name, presented, TokenUse::SingleUse, insert);
            let written: Vec<(i64,)> = written.await.map_err(|error| match error {
                WriteError::Admit(error) => stale(error),
                other => panic!("{other:?}"),
            })?;
            assert_eq!(written, [(value,)]);
        }
        "a transaction of the caller's" => {
            let mut tx = db.pool.begin().await.unwrap();
            let admitted = fence.admit(&mut tx, &name, presented, TokenUse::SingleUse);
            admitted.await.map_err(stale)?;
            tx.commit().await.unwrap();
        }
        "the function" => {
            let mut conn = db.pool.acquire().await.unwrap();
            let admitted = functions::admit(&mut conn, way, value).await;
            admitted.map_err(|refused| refused.problem["max_token"].as_i64().unwrap())?;
        }
        "under a key" => {
            let layer = FenceLayer::new(fence, move |_: &Parts| Resource::new(way))
                .idempotent(Idempotency::required());
            let write = async |_: FencedTx<Postgres>| "written";
            let app: Router = Router::new().route("/", post(write)).route_layer(layer);
            let request = Request::post("/")
                .header("Fencing-Token", value)
                .header("Idempotency-Key", format!("\"{}\"", another("")))
                .body(Body::empty());
            let answer = app.oneshot(request.unwrap()).await.unwrap();
            if answer.status() != 200 {
                let body = to_bytes(answer.into_body(), 10_000).await.unwrap();
                let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
                return Err(problem["max_token"].as_i64().unwrap());
            }
        }
        _ => unreachable!(),
    }
    Ok(())
}

#[tokio::test]
async fn admissible_tokens_are_refused_on_a_new_timeline() {
    let db = ways_in_epoch_1().await;
    was_on_timeline(&db, "00000000").await;
    for way in WAYS {
        for stale in [1_000_000_006, HIGHEST_STALE] {
            let refused = attempt(&db, way, stale).await;
            assert_eq!(refused, Err(HIGHEST_STALE), "{way} {stale}");
        }
        attempt(&db, way, HIGHEST_STALE + 2).await.unwrap();
    }
    // Without a row, the floor of the partition decides.
    let remove = "DELETE FROM tower_fence.resources; UPDATE tower_fence.floors SET floor = 0, failover_floor = 0";
    db.execute(remove).await;
    was_on_timeline(&db, "0000000F").await;
    for way in WAYS {
        let refused = attempt(&db, way, HIGHEST_STALE + 3).await;
        assert_eq!(refused, Err(2_001_999_999_999), "{way}");
    }
}

/// On each unobserved timeline, as many tokens may have been granted as on an observed one.
#[tokio::test]
async fn unobserved_timelines_are_counted_too() {
    let db = ways_in_epoch_1().await;
    for (before, here, highest_stale) in [
        ("1500000001", "1500000006", 5_001_999_999_999),
        // Each major version of Postgres starts its count of timelines again.
        ("1500000006", "1600000001", HIGHEST_STALE),
        ("1600000001", "1700000009", HIGHEST_STALE),
        // The server was restored from an older backup.
        ("1700000009", "1700000002", HIGHEST_STALE),
    ] {
        was_on_timeline(&db, before).await;
        is_on_timeline(&db, here).await;
        let refused = attempt(&db, "the function", 1_000_000_006).await;
        assert_eq!(refused, Err(highest_stale), "{before} {here}");
    }
}

#[tokio::test]
async fn row_of_an_earlier_timeline_accepts_a_new_epoch() {
    let db = ways_in_epoch_1().await;
    was_on_timeline(&db, "00000000").await;
    for way in WAYS {
        attempt(&db, way, HIGHEST_STALE + 2).await.unwrap();
        let state = db.fence().inspect(&resource(way)).await;
        assert_eq!(state.unwrap(), Some(HIGHEST_STALE + 2), "{way}");
    }
}

#[tokio::test]
async fn without_failover_detection_a_new_timeline_changes_nothing() {
    let db = ways_in_epoch_1().await;
    let fence = db.fence();
    fence.notice_failover(false).await.unwrap();
    was_on_timeline(&db, "00000000").await;
    for way in WAYS {
        attempt(&db, way, 1_000_000_006).await.unwrap();
    }
    // Promotions that happened while detection was off are not detected later.
    fence.notice_failover(true).await.unwrap();
    for way in WAYS {
        attempt(&db, way, 1_000_000_007).await.unwrap();
    }
    was_on_timeline(&db, "0000000F").await;
    for way in WAYS {
        let refused = attempt(&db, way, 1_000_000_008).await;
        assert_eq!(refused, Err(HIGHEST_STALE), "{way}");
    }
}

#[tokio::test]
async fn tokens_of_other_issuers_ignore_a_promotion() {
    let db = Postgres::fresh(4).await;
    db.execute("CREATE TABLE log (token bigint)").await;
    for presented in [5, 6] {
        for way in WAYS {
            attempt(&db, way, presented).await.unwrap();
            assert_eq!(attempt(&db, way, presented).await, Err(presented), "{way}");
        }
        was_on_timeline(&db, "00000000").await;
    }
}

#[tokio::test]
async fn concurrent_writers_advance_a_partition_once() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    was_on_timeline(&db, "00000000").await;
    let writers = (0..32).map(|n| {
        let (fence, name) = (db.fence(), resource(&format!("new-{n}")));
        tokio::spawn(async move {
            fence.next_epoch(PARTITION, Epoch::FIRST).await.unwrap();
            refuses(&fence, 1_000_000_006, HIGHEST_STALE).await;
            let admitted = fence.begin(&name, token(5_000_000_000_000), TokenUse::Reusable);
            drop(admitted.await.unwrap());
        })
    });
    for writer in futures_util::future::join_all(writers).await {
        writer.unwrap();
    }
    let next = fence.next_epoch(PARTITION, Epoch::FIRST).await.unwrap();
    assert_eq!(next, Epoch::new(1_001 + 32 + 1).unwrap());
}

/// The database may have lost a grant above the token.
#[tokio::test]
async fn reset_counts_the_epochs_that_a_failover_may_have_lost() {
    let (db, _fence) = in_epoch_1::<Postgres>().await;
    was_on_timeline(&db, "00000000").await;
    let reset = "SELECT tower_fence.reset('sku-1', 1000000010)";
    assert_eq!(db.number(reset).await, 1_001_000_000_000);
}

/// Tokens of another issuer are above all epochs, and a removal of their rows has raised the floor.
#[tokio::test]
async fn floor_above_all_epochs_stays() {
    let (db, _fence) = in_epoch_1::<Postgres>().await;
    let floor = "UPDATE tower_fence.floors SET floor = 700000000000000";
    db.execute(floor).await;
    was_on_timeline(&db, "00000000").await;
    let mut conn = db.pool.acquire().await.unwrap();
    let admit = "SELECT tower_fence.admit('sku-2', 700000000000000)";
    for failover in ["catch_up('sku-2')", "after_failover()"] {
        Postgres::run(&mut conn, &format!("SELECT tower_fence.{failover}")).await;
        functions::refuses(&mut conn, admit, "TF412").await;
    }
}

/// The second call reads the partition before the first one is committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_catch_up_does_not_advance_a_partition_again() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    was_on_timeline(&db, "00000000").await;
    let mut first = db.pool.begin().await.unwrap();
    let next = format!("SELECT tower_fence.next_epoch({PARTITION}::smallint, 1)");
    Postgres::run(&mut first, &next).await;
    let second = tokio::spawn(async move { fence.next_epoch(PARTITION, Epoch::FIRST).await });
    db.waits_for_lock().await;
    first.commit().await.unwrap();
    assert_eq!(second.await.unwrap().unwrap().get(), 1_001 + 2);
}

#[tokio::test]
async fn refused_request_leaves_the_partition_advanced() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    was_on_timeline(&db, "00000000").await;
    refuses(&fence, 1_000_000_006, HIGHEST_STALE).await;
    let moved = "SELECT max(epoch) FROM tower_fence.epochs";
    assert_eq!(db.number(moved).await, 1_001);
    refuses(&db.fence(), HIGHEST_STALE, HIGHEST_STALE).await;
    assert_eq!(db.number(moved).await, 1_001);
}

#[tokio::test]
async fn grant_from_before_a_failover_is_superseded() {
    let lease = LeaseDigest::of("a-lease");
    for renews in [false, true] {
        let (db, fence) = in_epoch_1::<Postgres>().await;
        let announce = async |renews| {
            let granted = token(1_000_000_006);
            fence.announce(&sku(), granted, &lease, renews).await
        };
        if renews {
            announce(false).await.unwrap();
        }
        was_on_timeline(&db, "00000000").await;
        let refused = announce(renews).await;
        assert_matches!(
            refused,
            Err(AnnounceError::Superseded { max_token: HIGHEST_STALE, was_last }) if was_last == renews
        );
    }
}

const TTL: Duration = Duration::from_secs(600);

/// Acquires `sku-1` from a lease store.
async fn acquire<L: Leases>(leases: &L) -> Lease {
    grant(leases, &sku(), TTL).await
}

async fn plain_renewal<L: Leases>(leases: &L, lease: &Lease) -> Result<Lease, LeaseError> {
    leases
        .renew(&lease.resource, &lease.id, Renew::new(TTL))
        .await
}

#[tokio::test]
async fn lease_in_postgres_is_lost_with_its_timeline() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    let before = acquire(&leases).await;
    plain_renewal(&leases, &before).await.unwrap();
    was_on_timeline(&db, "00000000").await;
    let lost = plain_renewal(&leases, &before).await;
    assert_matches!(lost, Err(LeaseError::Lost { .. }));
    // The resource is free again immediately.
    let after = acquire(&leases).await;
    assert_eq!(after.token, token(1_002_000_000_001));
    write(&db.fence(), after.token.get()).await.unwrap();

    let other = resource("sku-2");
    let held = grant(&leases, &other, TTL).await;
    db.fence().after_failover().await.unwrap();
    assert!(leases.inspect(&other).await.unwrap().is_none());
    let lost = plain_renewal(&leases, &held).await;
    assert_matches!(lost, Err(LeaseError::Lost { .. }));

    acquire(&leases).await;
    was_on_timeline(&db, "0000000F").await;
    // The first client after the failover may also be a writer.
    write(&db.fence(), 999_000_000_000_000).await.unwrap();
    assert!(leases.inspect(&sku()).await.unwrap().is_none());
    let held = acquire(&leases).await;

    // It does not wait for a holder that is renewing the lease, who would then wait for it.
    was_on_timeline(&db, "0000000F").await;
    let mut renewing = db.pool.begin().await.unwrap();
    Postgres::run(&mut renewing, "SELECT FROM tower_fence.leases FOR UPDATE").await;
    write(&db.fence(), 999_500_000_000_000).await.unwrap();
    renewing.rollback().await.unwrap();
    let lost = plain_renewal(&leases, &held).await;
    assert_matches!(lost, Err(LeaseError::Lost { .. }));

    // At a stricter isolation level, it leaves the lease to the next renewal as well.
    let held = acquire(&leases).await;
    was_on_timeline(&db, "0000000F").await;
    let mut tx = db.pool.begin().await.unwrap();
    Postgres::run(&mut tx, "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE").await;
    let admitted = functions::admit(&mut tx, "sku-1", 999_600_000_000_000).await;
    admitted.unwrap();
    tx.commit().await.unwrap();
    let lost = plain_renewal(&leases, &held).await;
    assert_matches!(lost, Err(LeaseError::Lost { .. }));
}

/// The grants are announced. The fence refuses the first announcement after the failover, so the
/// store begins a new epoch immediately.
#[tokio::test]
async fn store_with_its_own_counter_begins_a_new_epoch() {
    async fn grants_above<L: Leases>(db: &Fresh<Postgres>, leases: L) {
        let before = acquire(&leases).await;
        leases.release(&sku(), &before.id).await.unwrap();
        was_on_timeline(db, "00000000").await;
        let after = acquire(&leases).await;
        assert!(after.token.get() > HIGHEST_STALE, "{after:?}");
        write(&db.fence(), after.token.get()).await.unwrap();
    }
    let db = Postgres::fresh(4).await;
    let redis = connect_shared(db.fence(), &fresh_prefix()).await;
    grants_above(&db, redis.announced_to(db.fence())).await;
    let db = Postgres::fresh(4).await;
    let memory = MemoryLeases::new(db.fence());
    grants_above(&db, memory.announced_to(db.fence())).await;
}

#[tokio::test]
async fn process_started_later_grants_above_a_failover() {
    let db = Postgres::fresh(4).await;
    let prefix = fresh_prefix();
    let connect = || connect_shared(db.fence(), &prefix);
    let leases = connect().await;
    let before = acquire(&leases).await;
    was_on_timeline(&db, "00000000").await;
    // The restarted issuer re-reports the epoch before its first grant, and learns that the epoch
    // and its leases have ended.
    let restarted = connect().await;
    let other = grant(&restarted, &in_the_same_partition(), TTL).await;
    assert_eq!(other.token, token(1_002_000_000_001));
    let lost = plain_renewal(&restarted, &before).await;
    assert_matches!(lost, Err(LeaseError::Lost { .. }));
}

#[tokio::test]
async fn grants_above_a_forged_token_are_stale_too() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    let forged = 700_000_000_000_000;
    write(&fence, forged).await.unwrap();
    let leases = PostgresLeases::new(db.fence());
    let before = acquire(&leases).await;
    assert_eq!(before.token, token(forged + 1));
    leases.release(&sku(), &before.id).await.unwrap();
    was_on_timeline(&db, "00000000").await;
    // This stands for a token whose grant was lost in the failover.
    let lost = forged + 2;
    refuses(&fence, lost, forged + 1_000_001).await;
    let after = acquire(&leases).await;
    assert_eq!(after.token, token(forged + 1_000_002));
    write(&fence, after.token.get()).await.unwrap();
    // Fewer tokens are left than a failover may lose.
    let highest = Token::MAX.get();
    write(&fence, highest - 1).await.unwrap();
    was_on_timeline(&db, "00000001").await;
    refuses(&fence, highest, highest).await;
}

/// Later epochs have passed the forged token before its row is read.
#[tokio::test]
async fn grants_above_a_forged_token_stay_stale_in_later_epochs() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    let forged = 7_000_000_000_000;
    write(&fence, forged).await.unwrap();
    was_on_timeline(&db, "00000000").await;
    let epoch = fence.next_epoch(PARTITION, Epoch::FIRST).await.unwrap();
    assert_eq!(epoch, Epoch::new(1_002).unwrap());
    let passed = Epoch::new(7_001).unwrap();
    fence.report_epoch(PARTITION, passed).await.unwrap();
    // The row is not removed, because the floor would include only its token, and not the grants
    // above it.
    assert_eq!(fence.remove_idle(Duration::ZERO, 10).await.unwrap(), 0);
    // This stands for a token whose grant was lost in the failover.
    let lost = forged + 2;
    refuses(&fence, lost, forged + 1_000_000).await;
    write(&fence, passed.token(1).unwrap().get()).await.unwrap();
}

/// While detection is off, a promotion does not make a row older than the last failover.
#[tokio::test]
async fn later_grants_survive_promotions_with_detection_off() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    // The operator calls `after_failover` before any other client uses the fence.
    was_on_timeline(&db, "00000000").await;
    fence.after_failover().await.unwrap();
    let epoch = fence.next_epoch(PARTITION, Epoch::FIRST).await.unwrap();
    fence.notice_failover(false).await.unwrap();
    for here in 1..6 {
        let next = epoch.token(here).unwrap();
        // The row was last used on the previous timeline, or on the one before that.
        if here != 3 {
            write(&db.fence(), next.get()).await.unwrap();
        }
        let other = in_the_same_partition();
        db.fence().raise(&other, next).await.unwrap();
        is_on_timeline(&db, &format!("990000000{here}")).await;
    }
}

/// An issuer has reported its grants, and no client has used the partition since the failover.
#[tokio::test]
async fn row_above_all_epochs_stays_until_its_partition_catches_up() {
    let (db, fence) = in_epoch_1::<Postgres>().await;
    let forged = 7_000_000_000_000;
    write(&fence, forged).await.unwrap();
    was_on_timeline(&db, "00000000").await;
    let live = LiveTokens::default().granted_up_to(token(8_000_000_000_000));
    let remove = async || {
        let removed = fence.remove_idle_below(Duration::ZERO, 10, &live).await;
        removed.unwrap()
    };
    assert_eq!(remove().await, 0);
    let lost = forged + 2;
    refuses(&fence, lost, forged + 1_000_000).await;
    assert_eq!(remove().await, 1);
    refuses(&db.fence(), lost, forged + 1_000_000).await;
}

/// Tokens that were granted above the forged token may be above all stale tokens, too.
#[tokio::test]
async fn row_close_to_the_stale_limit_is_advanced_further() {
    for (forged, highest_stale, removed) in [
        (HIGHEST_STALE - 1_000_000, HIGHEST_STALE, 1),
        (HIGHEST_STALE - 10, HIGHEST_STALE + 999_990, 0),
    ] {
        let (db, fence) = in_epoch_1::<Postgres>().await;
        write(&fence, forged).await.unwrap();
        was_on_timeline(&db, "00000000").await;
        fence.next_epoch(PARTITION, Epoch::FIRST).await.unwrap();
        let idle = fence.remove_idle(Duration::ZERO, 10).await;
        assert_eq!(idle.unwrap(), removed, "{forged}");
        let lost = forged + 1;
        refuses(&db.fence(), lost, highest_stale).await;
        write(&db.fence(), highest_stale + 1).await.unwrap();
    }
}

#[tokio::test]
async fn partially_restored_tables_are_an_error() {
    let db = Postgres::fresh(4).await;
    db.execute("DELETE FROM tower_fence.floors").await;
    let leases = PostgresLeases::new(db.fence());
    is_misconfigured(leases.acquire(&sku(), Acquire::new(LONG)).await);
    let admitted = write(&db.fence(), 5).await;
    assert_matches!(admitted, Err(AdmitError::Misconfigured(_)));
    let removed = db.fence().remove_idle(Duration::ZERO, 10).await;
    assert_matches!(removed, Err(AdmitError::Misconfigured(_)));
    let mut conn = db.pool.acquire().await.unwrap();
    let refused = functions::admit(&mut conn, "sku-1", 5).await;
    let refused = functions::is_refused(refused, "55000");
    assert_contains!(refused.hint, "from a backup");
    functions::is_refused(functions::raise(&mut conn, "sku-1", 5).await, "55000");
}

#[tokio::test]
async fn renewal_after_a_failover_is_refused() {
    let db = Postgres::fresh(4).await;
    let prefix = fresh_prefix();
    let connect = || connect_shared(db.fence(), &prefix);
    let before = acquire(&connect().await).await;
    was_on_timeline(&db, "00000000").await;
    // This issuer has not read the epoch within the last minute.
    let leases = connect().await;
    let is_lost = async || {
        let renewed = plain_renewal(&leases, &before).await;
        matches!(renewed, Err(LeaseError::Lost { .. }))
    };
    eventually("the renewal is refused", is_lost).await;
}
