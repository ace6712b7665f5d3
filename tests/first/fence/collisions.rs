//! Transactions that conflict with others (40001, 40P01): which operations are retried, and which
//! are not.

use std::time::Duration;

use axum::{http::StatusCode, routing::post};
use sqlx::Postgres;
use tokio::time::Instant;
use tower_fence::{
    AdmitError, FenceLayer, Idempotency, PathParam, PgFencedTx, TokenUse,
    announce::{Announce, LeaseDigest},
    fence::{CommitError, WriteError},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    fence::{begin, insert, resource, sku, token, write},
    http::{Answer, Server},
};

/// Makes the next `count` writes to a table fail with this code. The sequence that counts the
/// writes is not rolled back.
async fn collide(db: &Fresh<Postgres>, table: &str, at: &str, code: &str, count: u32) {
    db.execute(&format!(
        "DROP TRIGGER IF EXISTS collide ON {table};
         DROP SEQUENCE IF EXISTS collisions CASCADE;
         CREATE SEQUENCE collisions;
         CREATE OR REPLACE FUNCTION collide() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF nextval('public.collisions') <= {count} THEN
                 RAISE EXCEPTION 'another transaction went first' USING ERRCODE = '{code}';
             END IF;
             RETURN NEW;
         END $$;
         CREATE {at} ON {table}{deferred} FOR EACH ROW EXECUTE FUNCTION collide()",
        deferred = if at.contains("CONSTRAINT") {
            " DEFERRABLE INITIALLY DEFERRED"
        } else {
            ""
        },
    ))
    .await;
}

const BEFORE: &str = "TRIGGER collide BEFORE INSERT OR UPDATE";
const AT_COMMIT: &str = "CONSTRAINT TRIGGER collide AFTER INSERT OR UPDATE";

/// Returns the number of writes for which the trigger has run.
async fn tries(db: &Fresh<Postgres>) -> i64 {
    db.number("SELECT last_value FROM collisions").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conflicting_admission_is_retried() {
    let db = Postgres::fresh(2).await;
    for (value, fence) in [(10, db.fence()), (20, db.reusing_fence())] {
        // The first admission inserts the row, and the later ones update it. If connections are
        // reused, the later ones run in a transaction that began early.
        for (step, code) in [(1, "40001"), (2, "40P01"), (3, "40001")] {
            collide(&db, "tower_fence.resources", BEFORE, code, 3).await;
            write(&fence, value + step).await.unwrap();
            assert_eq!(tries(&db).await, 4);
            assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(value + step));
        }
    }
    assert_eq!(db.entries().await, 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_admissions_are_retried_from_the_first() {
    let db = Postgres::fresh(2).await;
    let both = [(sku(), token(5)), (resource("other"), token(6))];
    collide(&db, "tower_fence.resources", BEFORE, "40001", 0).await;
    // The second of the two admissions conflicts, and the first one is rolled back with it.
    let second = "ALTER SEQUENCE collisions START -1 MINVALUE -1 RESTART; \
         CREATE OR REPLACE FUNCTION collide() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF nextval('public.collisions') = 0 THEN RAISE EXCEPTION USING ERRCODE = '40001'; END IF; \
             RETURN NEW; END $$";
    db.execute(second).await;
    let tx = db.fence().begin_all(&both, TokenUse::SingleUse).await;
    tx.unwrap().commit().await.unwrap();
    for (resource, token) in both {
        let max_token = db.fence().inspect(&resource).await.unwrap();
        assert_eq!(max_token, Some(token.get()));
    }
    assert_eq!(tries(&db).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conflicting_raise_and_announcement_are_retried() {
    let db = Postgres::fresh(2).await;
    let fence = db.fence();
    collide(&db, "tower_fence.resources", BEFORE, "40001", 2).await;
    fence.raise(&sku(), token(5)).await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(4));
    collide(&db, "tower_fence.resources", BEFORE, "40001", 2).await;
    let lease = LeaseDigest::of("the id of a lease");
    let announced = fence.announce(&sku(), token(9), &lease, false).await;
    announced.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(8));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_end_at_the_lock_timeout() {
    let db = Postgres::fresh(2).await;
    collide(&db, "tower_fence.resources", BEFORE, "40001", u32::MAX).await;
    let limit = Duration::from_secs(1);
    let fence = db.fence_with(|fence| fence.lock_timeout(limit));
    let began = Instant::now();
    let refused = write(&fence, 5).await;
    assert_matches!(refused, Err(AdmitError::Busy(_)));
    // The default timeout is five times as long.
    assert!(began.elapsed() < 5 * limit, "{:?}", began.elapsed());
    assert!(tries(&db).await > 1);
    // In a transaction of the caller, the fence cannot retry.
    let before = tries(&db).await;
    let mut tx = db.pool.begin().await.unwrap();
    let sku = sku();
    let refused = fence.admit(&mut tx, &sku, token(5), TokenUse::SingleUse);
    assert!(matches!(refused.await, Err(AdmitError::Busy(_))));
    assert_eq!(tries(&db).await, before + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_retried_after_the_admission() {
    let db = Postgres::fresh(2).await;
    let fence = db.fence();
    collide(&db, "ledger", AT_COMMIT, "40001", 1).await;
    let mut tx = begin(&fence, 5).await;
    insert(&mut tx, 5).await;
    let outcome = tx.commit().await;
    assert_matches!(outcome, Err(CommitError::Busy(_)));
    assert_eq!((tries(&db).await, db.entries().await), (1, 0));
    assert_eq!(fence.inspect(&sku()).await.unwrap(), None);
}

/// The fence has the complete statement, and a conflict ends its transaction without any effect, so
/// a retry is safe.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conflicting_single_statement_is_retried() {
    let db = Postgres::fresh(2).await;
    let (fence, sku) = (db.fence(), sku());
    let write = async |value| {
        let insert = "INSERT INTO ledger SELECT $1 FROM fence RETURNING entry";
        let query = sqlx::query(insert).bind(value);
        let once = TokenUse::SingleUse;
        fence.write::<(i64,)>(&sku, token(value), once, query).await
    };
    // The first write to a resource uses an open transaction, and the later ones use single
    // statements.
    let mut value = 1;
    for table in ["ledger", "tower_fence.resources", "ledger"] {
        for code in ["40P01", "40001"] {
            collide(&db, table, BEFORE, code, 3).await;
            assert_eq!(write(value).await.unwrap(), [(value,)]);
            // An existing row is written by an upsert, which fires the trigger twice.
            assert!(tries(&db).await >= 4, "{table} {code} {value}");
            assert_eq!(db.entries().await, value);
            value += 1;
        }
    }
    // The retries stop after the lock timeout.
    collide(&db, "ledger", BEFORE, "40P01", u32::MAX).await;
    let limit = Duration::from_secs(1);
    let began = Instant::now();
    let hasty = db.fence_with(|fence| fence.lock_timeout(limit));
    let query = sqlx::query("INSERT INTO ledger SELECT 99 FROM fence RETURNING entry");
    let refused = hasty.write::<(i64,)>(&sku, token(99), TokenUse::SingleUse, query);
    assert_matches!(refused.await, Err(WriteError::Admit(AdmitError::Busy(_))));
    // The default timeout is five times as long.
    assert!(began.elapsed() < 5 * limit, "{:?}", began.elapsed());
    assert!(tries(&db).await > 1);
    // After any other error, the statement is not retried.
    collide(&db, "ledger", BEFORE, "23514", 1).await;
    let refused = write(99).await;
    assert_matches!(refused, Err(WriteError::Statement(_)));
    assert_eq!((tries(&db).await, db.entries().await), (1, value - 1));
}

/// The handler is not run again. The answer says that the client may retry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conflicting_handler_transaction_is_answered_503() {
    async fn handler(mut tx: PgFencedTx) -> Result<&'static str, StatusCode> {
        let written = sqlx::query("INSERT INTO ledger VALUES (5)").execute(&mut *tx);
        written.await.map_err(|_| StatusCode::CONFLICT)?;
        Ok("written")
    }
    for keyed in [false, true] {
        let db = Postgres::fresh(2).await;
        let layer = FenceLayer::new(db.fence(), PathParam("r"));
        let layer = layer.idempotent(Idempotency::optional());
        let server = Server::at("/{r}", post(handler).route_layer(layer)).await;
        let write = async || {
            let mut request = server.post("/sku-1").header("Fencing-Token", "5");
            if keyed {
                request = request.header("Idempotency-Key", "\"k\"");
            }
            Answer::to(request).await
        };
        for at in [BEFORE, AT_COMMIT] {
            collide(&db, "ledger", at, "40001", 1).await;
            let answer = write().await;
            if at == AT_COMMIT {
                answer.is_problem(503, "fence-busy");
            } else {
                // The handler returns this status for its own error.
                assert_eq!(answer.status, 409, "{answer:?}");
            }
            assert_eq!((tries(&db).await, db.entries().await), (1, 0), "{at}");
            assert_eq!(db.fence().inspect(&sku()).await.unwrap(), Some(4));
        }
        // The conflict occurs in the admission, in the raise after a failed handler, or, if the
        // request has a key, in the record of the key.
        for table in ["tower_fence.resources", "tower_fence.idempotency_keys"] {
            if table == "tower_fence.resources" || keyed {
                collide(&db, table, BEFORE, "40001", 2).await;
            }
        }
        let answer = write().await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(db.entries().await, 1);
    }
}
