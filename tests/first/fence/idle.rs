//! The time of the last use of a resource. Each use updates it, because otherwise the row would be
//! removed as idle.

use std::time::Duration;

use axum::{http::request::Parts, routing::get};
use sqlx::Postgres;
use tower_fence::{
    Fence, FenceLayer, Resource,
    announce::{Announce, LeaseDigest},
    fence::FenceDatabase,
};

use crate::support::{
    database::{Fresh, TestDatabase, on_both_databases},
    fence::{begin, resource, sku, token, use_up, write, write_at_once},
    functions,
    http::{Answer, Server},
    soon,
};

on_both_databases!(
    each_use_refreshes_the_age_of_a_row,
    maintenance_removes_expired_keys_and_idle_rows,
);

/// The uses of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Use {
    Write,
    Raise,
    Announce,
    Read,
}

const USES: [Use; 4] = [Use::Write, Use::Raise, Use::Announce, Use::Read];

impl Use {
    async fn with<DB: FenceDatabase + TestDatabase>(self, fence: &Fence<DB>, value: i64) {
        match self {
            Self::Write => begin(fence, value).await.commit().await.unwrap(),
            Self::Raise => fence.raise(&sku(), token(value)).await.unwrap(),
            Self::Announce => {
                let lease = LeaseDigest::of("the-lease-of-whoever-uses-it");
                let announced = fence.announce(&sku(), token(value), &lease, false).await;
                announced.unwrap();
            }
            Self::Read => {
                let layer = FenceLayer::new(fence.clone(), |_: &Parts| Resource::new("sku-1"));
                let server = Server::at("/", get(async || "read").route_layer(layer)).await;
                let read = server.get("/").header("Fencing-Token", value);
                assert_eq!(Answer::to(read).await.status, 200);
            }
        }
    }
}

/// Sets the last use of the row to this number of hours ago. A negative number sets it in the
/// future. A transaction that began before the last use sees such a time.
async fn used<DB: TestDatabase>(db: &Fresh<DB>, hours_ago: i64) {
    let then = if DB::ABORTS_ON_ERROR {
        format!("now() - {hours_ago} * interval '1 hour'")
    } else {
        format!("datetime('now', '{} hours')", -hours_ago)
    };
    let age = format!("UPDATE tower_fence.resources SET updated_at = {then}");
    db.execute(&age).await;
}

/// Whether a removal of rows that have been idle for an hour removes this row. Afterwards, the
/// floor is reset.
async fn is_idle<DB: TestDatabase>(db: &Fresh<DB>) -> bool {
    let hour = Duration::from_secs(3_600);
    let removed = db.fence().remove_idle(hour, 10).await.unwrap();
    db.execute("UPDATE tower_fence.floors SET floor = 0").await;
    removed == 1
}

async fn each_use_refreshes_the_age_of_a_row<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    for (value, one) in (1..).zip(USES) {
        let fence = db.fence();
        write(&fence, 10 * value).await.unwrap();
        used(&db, 24).await;
        one.with(&fence, 10 * value + 5).await;
        assert!(!is_idle(&db).await, "{one:?}");
        used(&db, 24).await;
        assert!(is_idle(&db).await, "{one:?}");
    }
}

/// The interval is the longest possible one, so only the first removal takes place.
async fn maintenance_removes_expired_keys_and_idle_rows<DB: TestDatabase>() {
    let (db, other) = (DB::fresh(4).await, resource("sku-2"));
    let fence = db.fence();
    write(&fence, 1).await.unwrap();
    used(&db, 91 * 24).await;
    fence.raise(&other, token(1)).await.unwrap();
    let (digest, [past, future]) = match DB::ABORTS_ON_ERROR {
        true => ("sha256('a')", ["now()", "now() + interval '1 day'"]),
        false => ("zeroblob(32)", ["0", "9999999999999"]),
    };
    db.execute(&format!(
        "INSERT INTO tower_fence.idempotency_keys (scope, key, fingerprint, expires_at) \
         VALUES ({digest}, 'old', {digest}, {past}), ({digest}, 'new', {digest}, {future})"
    ))
    .await;
    let maintained = fence.clone();
    let maintenance = tokio::spawn(async move { maintained.maintain(Duration::MAX).await });
    let [keys, rows] = ["tower_fence.idempotency_keys", "tower_fence.resources"];
    soon!(
        "one row of each table is removed",
        db.count(keys).await == 1 && db.count(rows).await == 1
    );
    assert_eq!(fence.inspect(&other).await.unwrap(), Some(0));
    assert!(!maintenance.is_finished());
    maintenance.abort();
}

#[tokio::test]
async fn other_writes_in_postgres_refresh_the_row_too() {
    let db = Postgres::fresh(4).await;
    let (fence, reusing) = (db.fence(), db.reusing_fence());
    let mut conn = db.pool.acquire().await.unwrap();
    write(&fence, 1).await.unwrap();
    for way in [
        "early",
        "one statement",
        "tower_fence.admit",
        "tower_fence.raise",
        "tower_fence.acquire",
    ] {
        let max_token = "SELECT max_token FROM tower_fence.resources WHERE resource = 'sku-1'";
        let value = db.number(max_token).await + 5;
        used(&db, 24).await;
        match way {
            "early" => {
                // The COMMIT of this transaction also begins the next transaction.
                let other = resource(&format!("another-{value}"));
                use_up(&reusing, &other, token(1)).await.unwrap();
                begin(&reusing, value).await.commit().await.unwrap();
            }
            "one statement" => write_at_once(&fence, &sku(), value).await,
            "tower_fence.admit" => drop(functions::admit(&mut conn, "sku-1", value).await.unwrap()),
            "tower_fence.raise" => drop(functions::raise(&mut conn, "sku-1", value).await.unwrap()),
            _ => functions::execute(&mut conn, "SELECT tower_fence.acquire('sku-1', '1 s')")
                .await
                .unwrap(),
        }
        let young = "tower_fence.resources \
            WHERE resource = 'sku-1' AND updated_at > now() - interval '1 hour'";
        assert_eq!(db.count(young).await, 1, "{way}");
    }
}

/// A transaction begins before the last use of a resource, waits for that use, and raises the fence
/// afterwards.
#[tokio::test]
async fn raise_does_not_age_a_row() {
    let db = Postgres::fresh(4).await;
    let fence = db.fence();
    let mut conn = db.pool.acquire().await.unwrap();
    write(&fence, 1).await.unwrap();
    let later = "tower_fence.resources WHERE updated_at > now() + interval '30 min'";
    for (value, one) in [(10, Use::Raise), (20, Use::Announce)] {
        used(&db, -1).await;
        one.with(&fence, value).await;
        assert_eq!(db.count(later).await, 1, "{one:?}");
    }
    functions::raise(&mut conn, "sku-1", 100).await.unwrap();
    assert_eq!(db.count(later).await, 1, "tower_fence.raise");
    functions::execute(&mut conn, "SELECT tower_fence.acquire('sku-1', '1 s')")
        .await
        .unwrap();
    assert_eq!(db.count(later).await, 1, "tower_fence.acquire");
}

/// The process of an issuer has ended while a request waited.
#[tokio::test]
async fn queue_of_an_ended_issuer_keeps_no_row() {
    let db = Postgres::fresh(4).await;
    db.execute("SELECT tower_fence.acquire('sku-1', '1 ms', owner => 'anna')")
        .await;
    db.execute(
        "INSERT INTO tower_fence.waiters (resource, ticket, lease, owner, listener) \
         VALUES ('sku-1', 1, sha256('b'), 'bob', 42)",
    )
    .await;
    let expired = "tower_fence.leases WHERE expires_at < now()";
    soon!("the lease expires", db.count(expired).await == 1);
    let removed = db.fence().remove_idle(Duration::ZERO, 10).await.unwrap();
    assert_eq!(removed, 1);
    for table in ["resources", "leases", "queues", "waiters"] {
        assert_eq!(
            db.count(&format!("tower_fence.{table}")).await,
            0,
            "{table}"
        );
    }
}
