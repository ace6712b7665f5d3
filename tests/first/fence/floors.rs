//! Removed rows, and the floor of the partition that they leave.

use std::time::Duration;

use sqlx::{Connection, PgConnection, Postgres};
use tower_fence::{
    AdmitError, Fence, LiveTokens, StaleToken, Token, TokenUse,
    announce::{Announce, AnnounceError, LeaseDigest},
    client::Holder,
    epochs::{Epoch, Epochs},
    fence::WriteError,
    lease::{MemoryLeases, live_tokens},
};

use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    fence::{begin, is_stale, resource, sku, token, use_up, write, write_at_once},
    functions,
};

on_both_databases!(
    refused_token_creates_no_row,
    floor_applies_only_to_its_partition,
    row_in_use_is_not_removed,
    forged_token_does_not_block_its_partition,
    removal_respects_its_row_limit,
    tokens_in_use_are_not_removed,
    refusal_by_the_floor_is_cached_as_such,
    reset_overrides_the_floor,
    holder_below_the_floor_renews_and_writes,
);

const NOW: Duration = Duration::ZERO;

/// Sets the last use of all resources to a day ago.
async fn age<DB: TestDatabase>(db: &Fresh<DB>) {
    let age = if DB::ABORTS_ON_ERROR {
        "UPDATE tower_fence.resources SET updated_at = updated_at - interval '1 day'"
    } else {
        "UPDATE tower_fence.resources SET updated_at = datetime(updated_at, '-1 day')"
    };
    db.execute(age).await;
}

async fn rows<DB: TestDatabase>(db: &Fresh<DB>) -> i64 {
    db.count("tower_fence.resources").await
}

/// Returns a fence with the floor 5 for the partition of `sku-1`.
async fn with_floor<DB: TestDatabase>() -> (Fresh<DB>, Fence<DB>) {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    write(&fence, 5).await.unwrap();
    age(&db).await;
    assert_eq!(fence.remove_idle(NOW, 10).await.unwrap(), 1);
    assert_eq!(rows(&db).await, 0);
    // Like another process, this fence has no cached state.
    let fence = db.fence();
    (db, fence)
}

#[track_caller]
fn is_stale_by_floor<T>(outcome: Result<T, AdmitError>, presented: i64, floor: i64) {
    match &outcome {
        Err(AdmitError::Stale(stale)) => assert!(stale.by_floor, "{stale:?}"),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("token {presented} was admitted"),
    }
    is_stale(outcome, presented, floor);
}

fn by_floor(presented: i64) -> impl Fn(&StaleToken) -> bool {
    move |stale| stale.by_floor && stale.presented_token == token(presented)
}

async fn refused_token_creates_no_row<DB: TestDatabase>() {
    let (db, fence) = with_floor::<DB>().await;
    for stale in [1, 5] {
        let raised = db.fence().raise(&sku(), token(stale)).await;
        is_stale_by_floor(raised, stale, 5);
    }
    for token_use in [TokenUse::SingleUse, TokenUse::Reusable] {
        is_stale_by_floor(db.fence().begin(&sku(), token(5), token_use).await, 5, 5);
    }
    let lease = LeaseDigest::of("the-lease-of-another");
    let superseded = fence.announce(&sku(), token(5), &lease, false).await;
    assert_matches!(
        superseded,
        Err(AnnounceError::Superseded { max_token: 5, .. })
    );
    assert_eq!(rows(&db).await, 0);
    fence.raise(&sku(), token(6)).await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(5));
    assert_eq!(rows(&db).await, 1);
    // If a resource has a row, the token of the row decides, even if it is not above the floor.
    fence.raise(&sku(), token(6)).await.unwrap();
}

#[tokio::test]
async fn single_statement_respects_the_floor() {
    let (db, fence) = with_floor::<Postgres>().await;
    let insert = sqlx::query("INSERT INTO ledger SELECT 77 FROM fence RETURNING entry");
    let sku = sku();
    let written = fence.write::<(i64,)>(&sku, token(5), TokenUse::SingleUse, insert);
    let refused = written.await.unwrap_err();
    assert_matches!(&refused, WriteError::Admit(AdmitError::Stale(stale)) if by_floor(5)(stale));
    assert_eq!(db.count("ledger WHERE entry = 77").await, 0);
    write_at_once(&fence, &sku, 6).await;
}

async fn floor_applies_only_to_its_partition<DB: TestDatabase>() {
    let (_db, fence) = with_floor::<DB>().await;
    // The CRC-32 of the first name ends with the same byte as that of sku-1. The CRC-32 of the
    // second name ends with another byte.
    let [same, other] = ["sku-124", "sku-2"].map(resource);
    let refused = use_up(&fence, &same, token(5)).await;
    assert!(matches!(refused, Err(AdmitError::Stale(stale)) if by_floor(5)(&stale)));
    assert_eq!(fence.inspect(&other).await.unwrap(), None);
    use_up(&fence, &other, token(1)).await.unwrap();
}

async fn row_in_use_is_not_removed<DB: TestDatabase>() {
    let db = DB::fresh(3).await;
    let fence = db.fence();
    write(&fence, 5).await.unwrap();
    let hour = Duration::from_secs(60 * 60);
    assert_eq!(fence.remove_idle(hour, 10).await.unwrap(), 0);
    // No row can be older than this time, so none is removed.
    assert_eq!(fence.remove_idle(Duration::MAX, 10).await.unwrap(), 0);
    age(&db).await;
    write(&fence, 6).await.unwrap();
    assert_eq!(fence.remove_idle(hour, 10).await.unwrap(), 0);
    age(&db).await;
    assert_eq!(fence.remove_idle(hour, 10).await.unwrap(), 1);
}

async fn forged_token_does_not_block_its_partition<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let last = fence.next_epoch(110, Epoch::new(3).unwrap()).await.unwrap();
    fence.raise(&resource("sku-124"), Token::MAX).await.unwrap();
    let next_epoch = Epoch::new(last.get() + 1).unwrap().token(1).unwrap();
    fence.raise(&sku(), next_epoch).await.unwrap();
    age(&db).await;
    assert_eq!(fence.remove_idle(NOW, 10).await.unwrap(), 0);
    // Once that epoch is assigned, the row is removed, and the floor includes its token.
    fence.next_epoch(110, Epoch::FIRST).await.unwrap();
    assert_eq!(fence.remove_idle(NOW, 10).await.unwrap(), 1);
    use_up(&fence, &sku(), next_epoch).await.unwrap();
}

async fn removal_respects_its_row_limit<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    // All these resources are in one partition.
    let names = (0..).map(|n| format!("item-{n}"));
    let names = names.filter(|name| crc32fast::hash(name.as_bytes()) & 0xff == 7);
    for name in names.take(40) {
        fence.raise(&resource(&name), token(2)).await.unwrap();
    }
    age(&db).await;
    assert_eq!(fence.remove_idle(NOW, 0).await.unwrap(), 0);
    assert_eq!(fence.remove_idle(NOW, 15).await.unwrap(), 15);
    assert_eq!(rows(&db).await, 25);
    assert_eq!(fence.remove_idle(NOW, 1_000).await.unwrap(), 25);
    assert_eq!(fence.remove_idle(NOW, 1_000).await.unwrap(), 0);
}

async fn tokens_in_use_are_not_removed<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    write(&fence, 5).await.unwrap();
    age(&db).await;
    let held = resource("sku-124");
    for (lowest, removed) in [(4, 0), (5, 0), (6, 1)] {
        let mut live = LiveTokens::default();
        live.add(&held, token(lowest));
        live.add(&held, token(9));
        let outcome = fence.remove_idle_below(NOW, 10, &live).await;
        assert_eq!(outcome.unwrap(), removed, "a lease with token {lowest}");
    }
    use_up(&fence, &held, token(6)).await.unwrap();

    // The tokens of this row belong to no epoch of this database, so the row stays unless the
    // caller names the highest granted token.
    let zxid = 0x2_0000_0007;
    fence.raise(&sku(), token(zxid)).await.unwrap();
    age(&db).await;
    // Only the row with token 6 is removed.
    assert_eq!(fence.remove_idle(NOW, 10).await.unwrap(), 1);
    assert_eq!(rows(&db).await, 1);
    for (granted, removed) in [(zxid - 2, 0), (zxid - 1, 1)] {
        let live = LiveTokens::default().granted_up_to(token(granted));
        let outcome = fence.remove_idle_below(NOW, 10, &live).await;
        assert_eq!(outcome.unwrap(), removed, "granted up to {granted}");
    }
}

async fn refusal_by_the_floor_is_cached_as_such<DB: TestDatabase>() {
    let (db, fence) = with_floor::<DB>().await;
    is_stale_by_floor(write(&fence, 3).await, 3, 5);
    // The refusal does not read the database.
    db.execute("DROP TABLE tower_fence.resources").await;
    is_stale_by_floor(write(&fence, 4).await, 4, 5);
}

async fn reset_overrides_the_floor<DB: TestDatabase>() {
    let (db, fence) = with_floor::<DB>().await;
    fence.reset(&sku(), token(3)).await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(3));
    is_stale(write(&fence, 3).await, 3, 3);
    write(&fence, 4).await.unwrap();
    age(&db).await;
    // A floor never decreases.
    assert_eq!(fence.remove_idle(NOW, 10).await.unwrap(), 1);
    is_stale_by_floor(write(&fence, 5).await, 5, 5);
    fence.reset(&sku(), token(9)).await.unwrap();
    assert_eq!(rows(&db).await, 0, "a reset above the floor creates no row");
}

async fn holder_below_the_floor_renews_and_writes<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let (fence, leases) = (db.fence(), MemoryLeases::new(db.fence()));
    let holder = Holder::new(leases.clone());
    let held = holder.acquire("sku-1").await.unwrap();
    // Another resource of the same partition was leased, written and removed.
    let other = holder.acquire("sku-124").await.unwrap();
    let used = use_up(&fence, other.resource(), other.token()).await;
    used.unwrap();
    other.release().await.unwrap();
    age(&db).await;
    let live = live_tokens(&leases).await.unwrap();
    let spared = fence.remove_idle_below(NOW, 10, &live).await;
    assert_eq!(spared.unwrap(), 0);
    assert_eq!(fence.remove_idle(NOW, 10).await.unwrap(), 1);

    let refused = use_up(&fence, held.resource(), held.token()).await;
    assert_matches!(&refused, Err(AdmitError::Stale(stale)) if stale.by_floor);
    held.check().unwrap();
    let renewed = held.renew_with_new_token().await.unwrap();
    let used = use_up(&fence, held.resource(), renewed.token).await;
    used.unwrap();
}

#[tokio::test]
async fn removal_skips_locked_rows_and_locked_floors() {
    let db = Postgres::fresh(4).await;
    let fence = db.fence();
    write(&fence, 5).await.unwrap();
    age(&db).await;
    let mut other = PgConnection::connect(&db.url).await.unwrap();
    for lock in [
        "SELECT FROM tower_fence.resources FOR UPDATE",
        "SELECT FROM tower_fence.floors WHERE partition = 110 FOR SHARE",
    ] {
        let mut tx = other.begin().await.unwrap();
        Postgres::run(&mut tx, lock).await;
        assert_eq!(fence.remove_idle(NOW, 10).await.unwrap(), 0, "{lock}");
        let removed = "CALL tower_fence.remove_idle('0', 10)";
        assert_eq!(db.number(removed).await, 0, "{lock}");
        tx.rollback().await.unwrap();
    }
    // More rows than are removed at a time.
    for in_sql in [false, true] {
        db.execute(
            "INSERT INTO tower_fence.resources (resource, max_token, updated_at, partition, history) \
             SELECT 'row ' || number, 5, updated_at, partition, history \
             FROM generate_series(1, 600) AS number, tower_fence.resources",
        )
        .await;
        let mut tx = other.begin().await.unwrap();
        let lock = "SELECT FROM tower_fence.resources WHERE resource = 'sku-1' FOR UPDATE";
        Postgres::run(&mut tx, lock).await;
        let removed = match in_sql {
            true => db.number("CALL tower_fence.remove_idle('0')").await,
            false => fence.remove_idle(NOW, u64::MAX).await.unwrap() as i64,
        };
        assert_eq!(removed, 600);
        tx.rollback().await.unwrap();
    }
    assert_eq!(fence.remove_idle(NOW, 10).await.unwrap(), 1);
}

#[tokio::test]
async fn functions_remove_rows_and_respect_the_floor() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    // The third name is in the last partition.
    let used = [("a", 5), ("b", 7), ("c136", 9)];
    for (name, value) in used {
        functions::admit(&mut conn, name, value).await.unwrap();
    }
    age(&db).await;
    for (call, expected) in [
        ("'2 days', max_rows => 1", 0),
        ("'1 hour', max_rows => 2", 2),
        ("older_than => NULL, older_than_ms => 3600000", 1),
        ("'1 hour'", 0),
    ] {
        let call = format!("CALL tower_fence.remove_idle({call})");
        let removed = Postgres::number(&mut conn, &call).await.unwrap();
        assert_eq!(removed, expected, "{call}");
    }
    assert_eq!(rows(&db).await, 0);
    for (name, value) in used {
        let seen = functions::max_token(&mut conn, name).await.unwrap();
        assert_eq!(seen, Some(value));
        for refused in [
            functions::admit(&mut conn, name, value).await,
            functions::admit_reusable(&mut conn, name, value).await,
            functions::raise(&mut conn, name, value).await,
            functions::raise(&mut conn, name, 1).await,
        ] {
            let refused = functions::is_refused(refused, "TF412");
            let floor = format!("is not newer than {value}, the floor of its partition");
            assert!(refused.message.ends_with(&floor), "{refused:?}");
            assert_eq!(refused.problem["used"], false);
            let stale: StaleToken = serde_json::from_value(refused.problem).unwrap();
            assert_eq!((stale.max_token, stale.by_floor), (value, true));
        }
    }
    assert_eq!(rows(&db).await, 0);
    assert_eq!(functions::raise(&mut conn, "a", 6).await.unwrap(), 5);
    assert_eq!(functions::admit(&mut conn, "b", 8).await.unwrap(), 8);
    let refused = functions::is_refused(functions::admit(&mut conn, "b", 8).await, "TF412");
    assert_eq!(refused.problem["by_floor"], false);

    let of = |arguments: &str| {
        format!("SELECT tower_fence.remove_idle_of(0::smallint, {arguments}, NULL, NULL)")
    };
    for nonsense in [
        of("'-1 s', 10"),
        of("NULL, 10"),
        of("'1 s', 0"),
        of("'1 s', -1"),
        of("'1 s', NULL"),
        // Postgres compares this interval as equal to zero, but a time of this age is in the
        // future.
        of("'-12 mon 360 days', 10"),
        "CALL tower_fence.remove_idle()".into(),
        "CALL tower_fence.remove_idle('1 hour', older_than_ms => 1)".into(),
    ] {
        let refused = functions::execute(&mut conn, &nonsense).await;
        assert_eq!(refused.unwrap_err().code, "22023", "{nonsense}");
    }
}

#[tokio::test]
async fn the_partition_is_the_same_in_both_languages() {
    let db = Postgres::fresh(1).await;
    let fence = db.fence();
    for name in [
        "a",
        "sku-1",
        "é",
        "日本語/42",
        "\u{10ffff}",
        &"x".repeat(255),
    ] {
        fence.raise(&resource(name), token(2)).await.unwrap();
    }
    let other =
        "tower_fence.resources WHERE partition IS DISTINCT FROM tower_fence.partition_of(resource)";
    assert_eq!(db.count(other).await, 0);
    assert_eq!(rows(&db).await, 6);
}

/// The operations that insert a row.
const INSERTS: [&str; 5] = ["write", "raise", "announce", "admit()", "raise()"];

/// Runs one of [`INSERTS`] with token 5. Returns whether it was refused.
async fn is_refused(insert: &str, fence: &Fence<Postgres>) -> bool {
    let (sku, lease) = (sku(), LeaseDigest::of("the-lease-of-one-who-is-late"));
    let mut conn = fence.pool().acquire().await.unwrap();
    match insert {
        "write" => write(fence, 5).await.is_err(),
        "raise" => fence.raise(&sku, token(5)).await.is_err(),
        "announce" => {
            let announced = fence.announce(&sku, token(5), &lease, false);
            announced.await.is_err()
        }
        "admit()" => functions::admit(&mut conn, "sku-1", 5).await.is_err(),
        _ => functions::raise(&mut conn, "sku-1", 5).await.is_err(),
    }
}

/// Checks that one of [`INSERTS`] waits for a transaction, and is refused after its commit.
async fn is_refused_after(db: &Fresh<Postgres>, insert: &'static str, commit: impl AsyncFnOnce()) {
    let fence = db.fence();
    let waits = tokio::spawn(async move { is_refused(insert, &fence).await });
    db.waits_for_lock().await;
    commit().await;
    assert!(waits.await.unwrap(), "{insert} was not refused");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_row_waits_for_a_moving_floor() {
    for insert in INSERTS {
        let db = Postgres::fresh(4).await;
        let mut removal = db.pool.begin().await.unwrap();
        let move_floor = "UPDATE tower_fence.floors SET floor = 5 WHERE partition = 110";
        Postgres::run(&mut removal, move_floor).await;
        let commit = async move || removal.commit().await.unwrap();
        is_refused_after(&db, insert, commit).await;
        assert_eq!(rows(&db).await, 0, "{insert}");
    }
}

/// Neither transaction sees a row at first. The slower one waits for the row of the other one,
/// which has a higher token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slower_insert_does_not_lower_a_higher_row() {
    for insert in INSERTS {
        let db = Postgres::fresh(4).await;
        let first = begin(&db.fence(), 9).await;
        let commit = async move || first.commit().await.unwrap();
        is_refused_after(&db, insert, commit).await;
        let state = db.fence().inspect(&sku()).await;
        assert_eq!(state.unwrap(), Some(9), "{insert}");
    }
}
