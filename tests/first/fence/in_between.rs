//! Changes by another session between two statements of an admission or of an announcement.

use sqlx::{
    Postgres,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tower_fence::{
    AdmitError, Fence,
    announce::{Announce, AnnounceError, LeaseDigest},
    epochs::{Epoch, Epochs},
};

use super::failover::{HIGHEST_STALE, PARTITION, was_on_timeline};
use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    fence::{sku, token, write},
    functions,
};

const EMPTY: &str = "DELETE FROM tower_fence.resources; DELETE FROM ledger";

/// A token of an epoch that was not assigned.
const ABOVE: i64 = 5_000_000_000_000;

/// Returns statements that make sessions wait before or after each INSERT of a row.
fn at_insert(when: &str) -> String {
    format!(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS \
             'BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END'; \
         CREATE TRIGGER wait {when} INSERT ON tower_fence.resources FOR EACH STATEMENT \
             WHEN (current_setting('application_name') = 'waiting') EXECUTE FUNCTION wait()"
    )
}

/// Statement that makes sessions wait between reading the floor and reading the highest stale
/// token.
const AFTER_FLOOR: &str = "DO $do$ BEGIN EXECUTE replace( \
         pg_get_functiondef('tower_fence.stale_up_to'::regproc), E'BEGIN\n', \
         E'BEGIN\nIF current_setting(''application_name'') = ''waiting'' \
             THEN PERFORM pg_advisory_xact_lock_shared(1); END IF;\n' \
     ); END $do$";

/// Returns a database in which a lease of epoch 1 was granted, and the fence of a process whose
/// sessions wait as the statements in `place` specify.
async fn waiting(place: &str) -> (Fresh<Postgres>, Fence<Postgres>) {
    let db = Postgres::fresh(4).await;
    db.fence()
        .next_epoch(PARTITION, Epoch::FIRST)
        .await
        .unwrap();
    db.execute(place).await;
    let options: PgConnectOptions = db.url.parse().unwrap();
    let pool = PgPoolOptions::new().connect_with(options.application_name("waiting"));
    (db, Fence::new(pool.await.unwrap()))
}

/// Runs `begun`, and runs `other` while `begun` waits.
async fn with_in_between<T>(
    db: &Fresh<Postgres>,
    begun: impl Future<Output = T>,
    other: impl AsyncFnOnce(),
) -> T {
    let mut holder = db.pool.acquire().await.unwrap();
    let lock = "SELECT pg_advisory_lock(1)";
    Postgres::run(&mut holder, lock).await;
    let other = async {
        eventually("the request waits", async || {
            let waiting = "SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database \
                 WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted";
            db.number(waiting).await == 1
        })
        .await;
        other().await;
        let unlock = "SELECT pg_advisory_unlock(1)";
        Postgres::run(&mut holder, unlock).await;
    };
    tokio::join!(begun, other).0
}

async fn catch_up(db: &Fresh<Postgres>) {
    db.execute("SELECT tower_fence.catch_up('sku-1')").await;
}

/// Writes through the SQL function, or in a transaction of the crate. A refusal returns the highest
/// stale token.
async fn attempt(fence: &Fence<Postgres>, in_sql: bool, value: i64) -> Result<(), i64> {
    if in_sql {
        let mut conn = fence.pool().acquire().await.unwrap();
        let admitted = functions::admit(&mut conn, "sku-1", value).await;
        return admitted.map(drop).map_err(|refused| {
            assert_eq!(refused.code, "TF412", "{refused:?}");
            refused.problem["max_token"].as_i64().unwrap()
        });
    }
    match write(fence, value).await {
        Err(AdmitError::Stale(stale)) => Err(stale.max_token),
        written => {
            written.unwrap();
            Ok(())
        }
    }
}

/// Announces a token. If the token is superseded, returns the highest token.
async fn announce(fence: &Fence<Postgres>, value: i64) -> Result<(), i64> {
    let lease = LeaseDigest::of("a");
    match fence.announce(&sku(), token(value), &lease, false).await {
        Err(AnnounceError::Superseded { max_token, .. }) => Err(max_token),
        announced => {
            announced.unwrap();
            Ok(())
        }
    }
}

#[tokio::test]
async fn refusal_on_an_earlier_timeline_is_checked_again() {
    for (in_sql, has_row) in [(false, false), (false, true), (true, false), (true, true)] {
        for (value, expected) in [(7, Err(HIGHEST_STALE)), (ABOVE, Ok(()))] {
            let (db, fence) = waiting(AFTER_FLOOR).await;
            if has_row {
                write(&db.fence(), 5).await.unwrap();
            }
            was_on_timeline(&db, "00000000").await;
            let begun = attempt(&fence, in_sql, value);
            let outcome = with_in_between(&db, begun, async || catch_up(&db).await).await;
            assert_eq!(outcome, expected, "{in_sql} {has_row} {value}");
        }
    }
}

#[tokio::test]
async fn grant_refused_on_an_earlier_timeline_is_announced_again() {
    for (value, expected) in [(7, Err(HIGHEST_STALE)), (ABOVE, Ok(()))] {
        let (db, fence) = waiting(AFTER_FLOOR).await;
        was_on_timeline(&db, "00000000").await;
        let begun = announce(&fence, value);
        let outcome = with_in_between(&db, begun, async || catch_up(&db).await).await;
        assert_eq!(outcome, expected);
    }
}

#[tokio::test]
async fn concurrently_created_row_counts() {
    for (made, expected) in [(5, Ok(())), (6, Ok(())), (9, Err(9))] {
        let (db, fence) = waiting(&at_insert("BEFORE")).await;
        let other = async || write(&db.fence(), made).await.unwrap();
        for in_sql in [false, true] {
            let outcome = with_in_between(&db, attempt(&fence, in_sql, 7), other).await;
            assert_eq!(outcome, expected, "{in_sql}");
            db.execute(EMPTY).await;
        }
        let outcome = with_in_between(&db, announce(&fence, 7), other).await;
        assert_eq!(outcome, expected);
        db.execute(EMPTY).await;
        // The fence is new, because a fence caches stale tokens.
        let fence = Fence::new(fence.pool().clone());
        let (sku, value) = (sku(), token(7));
        let raised = with_in_between(&db, fence.raise(&sku, value), other).await;
        assert_eq!(raised.is_ok(), made < 7);
        assert_eq!(fence.inspect(&sku).await.unwrap(), Some(made.max(6)));
        db.execute(EMPTY).await;
        let mut conn = fence.pool().acquire().await.unwrap();
        let raised = with_in_between(&db, functions::raise(&mut conn, "sku-1", 7), other).await;
        assert_eq!(
            raised.map_err(|refused| refused.code),
            if made < 7 { Ok(6) } else { Err("TF412".into()) }
        );
        assert_eq!(fence.inspect(&sku).await.unwrap(), Some(made.max(6)));
    }
}

#[tokio::test]
async fn row_created_after_the_first_read_is_read_again() {
    let (db, fence) = waiting(&at_insert("AFTER UPDATE OR")).await;
    let other = async || write(&db.fence(), 5).await.unwrap();
    for value in [5, 6, 7] {
        let admitted = with_in_between(&db, attempt(&fence, true, value), other).await;
        assert_eq!(admitted, if value > 5 { Ok(()) } else { Err(5) });
        db.execute(EMPTY).await;
        let mut conn = fence.pool().acquire().await.unwrap();
        let raise = functions::raise(&mut conn, "sku-1", value);
        let raised = with_in_between(&db, raise, other).await;
        let raised = raised.map_err(|refused| refused.problem["max_token"].as_i64());
        assert_eq!(
            raised,
            if value > 5 {
                Ok(value - 1)
            } else {
                Err(Some(5))
            }
        );
        db.execute(EMPTY).await;
        // The fence is new, because a fence caches stale tokens.
        let fence = Fence::new(fence.pool().clone());
        let (sku, token) = (sku(), token(value));
        let raised = with_in_between(&db, fence.raise(&sku, token), other).await;
        assert_eq!(raised.is_ok(), value > 5);
        assert_eq!(fence.inspect(&sku).await.unwrap(), Some(5.max(value - 1)));
        db.execute(EMPTY).await;
    }
}

/// The admission stays undecided, for example because a trigger of the application discards each
/// write.
#[tokio::test]
async fn undecided_admission_is_an_error_not_a_refusal() {
    for has_row in [false, true] {
        let db = Postgres::fresh(2).await;
        if has_row {
            write(&db.fence(), 5).await.unwrap();
        }
        db.execute(
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; \
             CREATE TRIGGER nothing BEFORE INSERT OR UPDATE ON tower_fence.resources \
                 FOR EACH ROW EXECUTE FUNCTION nothing()",
        )
        .await;
        let busy = write(&db.fence(), 7).await;
        assert_matches!(busy, Err(AdmitError::Busy(_)));
        let raised = db.fence().raise(&sku(), token(7)).await;
        assert_matches!(raised, Err(AdmitError::Busy(_)));
        let mut conn = db.pool.acquire().await.unwrap();
        let refused = functions::admit(&mut conn, "sku-1", 7).await;
        assert_eq!(refused.unwrap_err().code, "40001");
        let refused = functions::raise(&mut conn, "sku-1", 7).await;
        assert_eq!(refused.unwrap_err().code, "40001");
    }
}
