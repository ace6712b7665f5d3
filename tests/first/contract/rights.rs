//! Tests that the rights which the documentation grants to each role are sufficient, and that none
//! of them is superfluous.

use std::{error::Error, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{Request, request::Parts},
    routing::any,
};
use sqlx::{PgPool, Postgres};
use tower::ServiceExt;
use tower_fence::{
    Fence, FenceLayer, Idempotency, Resource, TokenUse,
    lease::{Acquire, LeaseAdmin, LeaseError, Leases, PostgresLeases, RedisLeases, Renew},
};

use super::{admission::answer, grants, resource, token};
use crate::support::{
    database::TestDatabase,
    lease::LONG,
    redis::{fresh_prefix, shared_url},
};

type Outcome = Result<(), Box<dyn Error>>;

/// Splits grants into single rights, such as `SELECT ON tower_fence.epochs`.
fn one_by_one(grants: &str) -> Vec<String> {
    let lines = grants.lines().filter(|line| !line.starts_with("--"));
    let mut rights = vec![];
    for line in lines {
        let (right, _) = line.split_once(" TO ").unwrap();
        let (privileges, objects) = right
            .strip_prefix("GRANT ")
            .and_then(|right| right.split_once(" ON "))
            .unwrap();
        let (kind, objects) = match objects.split_once(' ') {
            Some((kind @ ("FUNCTION" | "PROCEDURE" | "SCHEMA"), objects)) => (kind, objects),
            _ => ("TABLE", objects),
        };
        for privilege in privileges.split(", ") {
            for object in objects.split(", ") {
                rights.push(format!("{privilege} ON {kind} {object}"));
            }
        }
    }
    rights
}

/// Does the work of a role with all rights of the documentation, and then without each one of them.
async fn each_right_is_needed(documented: &str, work: impl AsyncFn(PgPool, &PgPool) -> Outcome) {
    let db = Postgres::fresh(1).await;
    // Epoch 1 of each partition is issued.
    db.execute("INSERT INTO tower_fence.epochs SELECT generate_series(0, 255), 1")
        .await;
    // The role has another name here, and no rights yet.
    let role = db.role("").await;
    let grants = grants(documented).replace(documented, &role.name);
    db.execute(&grants).await;
    // The application needs these rights for its own statements.
    db.execute(&format!("GRANT SELECT, INSERT ON ledger TO {}", role.name))
        .await;
    let pool = role.pool().await;
    work(pool.clone(), &db.pool).await.unwrap();
    // These statements would make stale tokens valid again.
    for forbidden in [
        "UPDATE tower_fence.floors SET floor = 0",
        "DELETE FROM tower_fence.resources",
        "UPDATE tower_fence.epoch_source SET id = ''",
    ] {
        let refused = sqlx::query(forbidden).execute(&pool).await.unwrap_err();
        let refused = refused.into_database_error().unwrap();
        assert_eq!(refused.code().as_deref(), Some("42501"), "{forbidden}");
    }
    let rights = one_by_one(&grants);
    for right in &rights {
        db.execute(&format!("REVOKE {right} FROM {}", role.name))
            .await;
        let outcome = work(role.pool().await, &db.pool).await;
        assert!(outcome.is_err(), "{documented} does not need {right}");
        db.execute(&format!("GRANT {right} TO {}", role.name)).await;
    }
    work(role.pool().await, &db.pool).await.unwrap();
    println!("{documented}: {} rights, each of them needed", rights.len());
}

/// Records another timeline as that of the last use of this resource.
async fn forget(db: &PgPool, name: &Resource) {
    let forget = "UPDATE tower_fence.resources SET history = '0' WHERE resource = $1";
    let forgotten = sqlx::query(forget).bind(name.as_str()).execute(db).await;
    assert_eq!(forgotten.unwrap().rows_affected(), 1);
}

fn new_resource() -> Resource {
    resource(&format!("sku-{:016x}", rand::random::<u64>()))
}

#[tokio::test]
async fn writer_through_the_crate_needs_these_rights() {
    each_right_is_needed("shop_writer", async |pool, owner| {
        let fence = Fence::new(pool.clone());
        fence.migrate().await?;
        let name = new_resource();
        let layer = FenceLayer::new(fence.clone(), {
            let name = name.to_string();
            move |_: &Parts| Resource::new(&name)
        })
        .idempotent(Idempotency::required())
        .issued_by_this_database();
        let app: Router = Router::new()
            .route("/{status}/{entry}", any(answer::<Postgres>))
            .route_layer(layer);
        let entry: u32 = rand::random();
        // A request that fails, a request that succeeds, and two repetitions of the second request.
        // The token of the last repetition was not granted.
        for (status, token) in [
            (409, 1_000_000_001),
            (200, 1_000_000_001),
            (200, 1_000_000_001_i64),
            (200, 900_000_000_000_001),
        ] {
            let request = Request::post(format!("/{status}/{entry}"))
                .header("Fencing-Token", token)
                .header("Idempotency-Key", format!("\"{status}\""))
                .body(Body::empty())?;
            let answered = app.clone().oneshot(request).await?.status();
            if answered != status {
                return Err(format!("{answered}, not {status}").into());
            }
        }
        let at_once =
            sqlx::query("INSERT INTO ledger SELECT 1000000000000 + $1 FROM fence RETURNING entry")
                .bind(i64::from(entry));
        let written: Vec<(i64,)> = fence
            .write(&name, token(1_000_000_002), TokenUse::Reusable, at_once)
            .await
            .map_err(|error| format!("{error:?}"))?;
        assert_eq!(written.len(), 1);
        // From here on, the fence detects a promotion.
        forget(owner, &name).await;
        let tx = fence.begin(&name, token(1_000_000_003), TokenUse::Reusable);
        tx.await?.commit().await?;
        fence.raise(&name, token(1_000_000_009)).await?;
        assert_eq!(fence.inspect(&name).await?, Some(1_000_000_008));
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn writer_through_the_functions_needs_these_rights() {
    each_right_is_needed("shop_worker", async |pool, _| {
        let name = new_resource();
        for (call, token) in [("tower_fence.admit", 5), ("tower_fence.raise", 8)] {
            let call = format!("SELECT {call}($1, $2)");
            let call = sqlx::query(sqlx::AssertSqlSafe(call))
                .bind(name.as_str())
                .bind(token);
            call.execute(&pool).await?;
        }
        let max_token = sqlx::query_scalar("SELECT tower_fence.max_token($1)").bind(name.as_str());
        let max_token: i64 = max_token.fetch_one(&pool).await?;
        assert_eq!(max_token, 7);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn issuer_needs_these_rights() {
    each_right_is_needed("shop_issuer", async |pool, owner| {
        let fence = Fence::new(pool.clone());
        fence.migrate().await?;
        let (prefix, name) = (fresh_prefix(), new_resource());
        // The second issuer finds the epoch of the first one.
        for _ in 0..2 {
            let leases = RedisLeases::builder(fence.clone()).key_prefix(&prefix);
            let leases = leases.connect(&shared_url()).await?;
            let leases = leases.announced_to(fence.clone());
            let lease = leases.acquire(&name, Acquire::new(LONG)).await?;
            leases.release(&name, &lease.id).await?;
            forget(owner, &name).await;
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn issuer_in_postgres_needs_these_rights() {
    each_right_is_needed("shop_lessor", async |pool, _| {
        let fence = Fence::new(pool.clone());
        fence.migrate().await?;
        let leases = PostgresLeases::new(fence);
        let (name, short) = (new_resource(), Duration::from_millis(200));
        let lease = leases.acquire(&name, Acquire::new(LONG)).await?;
        let in_vain = leases.acquire(&name, Acquire::new(short).wait(short)).await;
        if !matches!(in_vain, Err(LeaseError::Held { .. })) {
            return Err(format!("{in_vain:?}").into());
        }
        let renew = Renew::new(LONG).with_new_token();
        leases.renew(&name, &lease.id, renew).await?;
        leases.list(10, None).await?;
        leases.release(&name, &lease.id).await?;
        leases.break_lease(&name, None).await?;
        // An issuer makes these calls only occasionally, in the background, or when its process
        // ends.
        let listen = format!("lease_listen({})", rand::random::<i64>());
        for call in ["lease_open('{a}', 1)", "lease_sweep()", &listen] {
            let call = sqlx::AssertSqlSafe(format!("SELECT tower_fence.{call}"));
            sqlx::query(call).execute(&pool).await?;
        }
        let abandon = "SELECT tower_fence.lease_end($1, '', 1), tower_fence.lease_call($1)";
        let abandon = sqlx::query(abandon).bind(name.as_str());
        abandon.execute(&pool).await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn holder_through_the_functions_needs_these_rights() {
    each_right_is_needed("shop_holder", async |pool, _| {
        let name = new_resource();
        let acquire = "SELECT lease_id FROM tower_fence.acquire($1, '30 s')";
        let acquire = sqlx::query_scalar(acquire).bind(name.as_str());
        let lease_id: String = acquire.fetch_one(&pool).await?;
        for call in [
            "tower_fence.renew($1, $2, '30 s')",
            "tower_fence.release($1, $2)",
        ] {
            let call = sqlx::AssertSqlSafe(format!("SELECT {call}"));
            let call = sqlx::query(call).bind(name.as_str()).bind(&lease_id);
            call.execute(&pool).await?;
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn operator_needs_these_rights() {
    each_right_is_needed("shop_operator", async |pool, _| {
        let fence = Fence::new(pool.clone());
        let name = new_resource();
        fence.inspect(&name).await?;
        fence.state(&name).await?;
        fence.states("", None, 10).await?;
        fence.floors().await?;
        // This token is above all epochs that the test will use.
        fence.reset(&name, token(900_000_000_000_005)).await?;
        fence.notice_failover(true).await?;
        fence.after_failover().await?;
        fence.remove_idle(Duration::from_secs(3_600), 10).await?;
        fence.remove_expired_keys().await?;
        for statement in [
            "CALL tower_fence.remove_idle('90 days', 1000)",
            "SELECT tower_fence.remove_expired_keys(1000)",
            "SELECT tower_fence.break_lease('sku-1')",
            "SELECT tower_fence.bypass('a row is mended by hand')",
            "SELECT * FROM tower_fence.held_leases",
            "SELECT * FROM tower_fence.protected_tables",
        ] {
            sqlx::query(statement).execute(&pool).await?;
        }
        Ok(())
    })
    .await;
}
