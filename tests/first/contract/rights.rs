//! The rights that the documentation grants to each role: they suffice, and none is too many.

use std::{error::Error, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{Request, request::Parts},
    routing::any,
};
use reqwest::Url;
use sqlx::{PgPool, Postgres, postgres::PgPoolOptions};
use tower::ServiceExt;
use tower_fence::{
    Fence, FenceLayer, Idempotency, Resource, TokenKey, TokenKeys, TokenUse,
    lease::{Acquire, LeaseError, Leases, Operate, PostgresLeases, RedisLeases, Renew},
    token_keys::KeyId,
};

use super::{admission::answer, grants, resource, token};
use crate::support::{
    database::{Fresh, TestDatabase},
    functions::add_token_key,
    redis::{fresh_prefix, shared_url},
};

type Outcome = Result<(), Box<dyn Error>>;

/// A role of the documentation. Roles are those of the whole server, so it has another name.
struct Role<'a> {
    db: &'a Fresh<Postgres>,
    name: String,
    url: Url,
}

impl<'a> Role<'a> {
    async fn create(db: &'a Fresh<Postgres>) -> Self {
        let name = format!("app_{:016x}", rand::random::<u64>());
        // Nobody else has a right, and the first epoch of each partition was handed out.
        db.execute(&format!(
            "REVOKE ALL ON SCHEMA public FROM PUBLIC; CREATE ROLE {name} LOGIN PASSWORD 'of-a-test'; \
             INSERT INTO fence_epochs SELECT generate_series(0, 255), 1"
        ))
        .await;
        let mut url = Url::parse(&db.url).unwrap();
        url.set_username(&name).unwrap();
        url.set_password(Some("of-a-test")).unwrap();
        Self { db, name, url }
    }

    /// New connections: a fence looks once where its tables are.
    async fn pool(&self) -> PgPool {
        let options = PgPoolOptions::new().max_connections(2);
        options.connect(self.url.as_str()).await.unwrap()
    }

    async fn drop(self) {
        let name = &self.name;
        let drop = format!("DROP OWNED BY {name}; DROP ROLE {name}");
        self.db.execute(&drop).await;
    }
}

/// Each right by itself, as `SELECT ON fence_epochs`.
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
            Some((kind @ ("FUNCTION" | "SCHEMA"), objects)) => (kind, objects),
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

/// Does the work of a role with the rights of the documentation, and then without each one of them.
async fn each_right_is_needed(documented: &str, work: impl AsyncFn(PgPool) -> Outcome) {
    let db = Postgres::fresh(1).await;
    let role = Role::create(&db).await;
    each_right_is_needed_of(&role, documented, work).await;
    role.drop().await;
}

/// The same of a role in a database that has what the work needs.
async fn each_right_is_needed_of(
    role: &Role<'_>,
    documented: &str,
    work: impl AsyncFn(PgPool) -> Outcome,
) {
    let db = role.db;
    let grants = grants(documented).replace(documented, &role.name);
    db.execute(&grants).await;
    // What the application's own statements need is not the fence's to say.
    db.execute(&format!("GRANT SELECT, INSERT ON ledger TO {}", role.name))
        .await;
    let pool = role.pool().await;
    work(pool.clone()).await.unwrap();
    // What would make the dead alive.
    for forbidden in [
        "UPDATE fence_floors SET floor = 0",
        "DELETE FROM fence_resources",
        "UPDATE fence_epoch_source SET id = ''",
    ] {
        let refused = sqlx::query(forbidden).execute(&pool).await.unwrap_err();
        let refused = refused.into_database_error().unwrap();
        assert_eq!(refused.code().as_deref(), Some("42501"), "{forbidden}");
    }
    let rights = one_by_one(&grants);
    for right in &rights {
        db.execute(&format!("REVOKE {right} FROM {}", role.name))
            .await;
        let outcome = work(role.pool().await).await;
        assert!(
            outcome.is_err(),
            "{documented} is granted {right}, and does not need it"
        );
        db.execute(&format!("GRANT {right} TO {}", role.name)).await;
    }
    work(role.pool().await).await.unwrap();
    println!("{documented}: {} rights, each of them needed", rights.len());
}

/// As if the server was on another time line when this resource was used last.
async fn forget(pool: &PgPool, name: &Resource) -> sqlx::Result<()> {
    let forget = "UPDATE fence_resources SET history = '0' WHERE resource = $1";
    sqlx::query(forget)
        .bind(name.as_str())
        .execute(pool)
        .await?;
    Ok(())
}

fn new_resource() -> Resource {
    resource(&format!("sku-{:016x}", rand::random::<u64>()))
}

#[tokio::test]
async fn whoever_writes_with_the_crate_needs_these_rights() {
    each_right_is_needed("shop_writer", async |pool| {
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
        // A failure, a success, and its repetition.
        for status in [409, 200, 200] {
            let request = Request::post(format!("/{status}/{entry}"))
                .header("Fencing-Token", 1_000_000_001)
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
        // As if the server was promoted since.
        forget(&pool, &name).await?;
        let tx = fence.begin(&name, token(1_000_000_003), TokenUse::Reusable);
        tx.await?.commit().await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn whoever_writes_through_the_functions_needs_these_rights() {
    each_right_is_needed("shop_worker", async |pool| {
        let name = new_resource();
        for (call, token) in [("fence_admit", 5), ("fence_raise", 8)] {
            let call = format!("SELECT {call}($1, $2)");
            let call = sqlx::query(sqlx::AssertSqlSafe(call))
                .bind(name.as_str())
                .bind(token);
            call.execute(&pool).await?;
        }
        let max_token = sqlx::query_scalar("SELECT fence_max_token($1)").bind(name.as_str());
        let max_token: i64 = max_token.fetch_one(&pool).await?;
        assert_eq!(max_token, 7);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn whoever_writes_with_signed_tokens_alone_needs_these_rights() {
    let db = Postgres::fresh(1).await;
    let (role, key) = (Role::create(&db).await, [7; 32]);
    let mut owner = db.pool.acquire().await.unwrap();
    add_token_key(&mut owner, "k1", &key, "").await.unwrap();
    drop(owner);
    let keys = TokenKey::new(KeyId::new("k1").unwrap(), key).unwrap();
    let keys = TokenKeys::new([keys]).unwrap();
    each_right_is_needed_of(&role, "shop_courier", async |pool| {
        let (name, field) = (new_resource(), |name: &Resource, n| {
            keys.sign(name, token(n)).to_string()
        });
        for (call, n) in [("fence_admit_signed", 5), ("fence_raise_signed", 8)] {
            let call = sqlx::AssertSqlSafe(format!("SELECT {call}($1)"));
            sqlx::query(call)
                .bind(field(&name, n))
                .execute(&pool)
                .await?;
        }
        let max_token = sqlx::query_scalar("SELECT fence_max_token($1)").bind(name.as_str());
        let max_token: i64 = max_token.fetch_one(&pool).await?;
        assert_eq!(max_token, 7);
        // What would let it make up a token.
        for forbidden in [
            "SELECT fence_admit('sku-1', 9)",
            "SELECT fence_raise('sku-1', 9)",
            "SELECT fence_add_token_key('k2', sha256('mine'))",
            "SELECT fence_verify('9')",
            "SELECT * FROM fence_token_keys",
            "UPDATE fence_token_keys SET inner_block = ''",
        ] {
            let refused = sqlx::query(forbidden).execute(&pool).await.unwrap_err();
            let refused = refused.into_database_error().unwrap();
            assert_eq!(refused.code().as_deref(), Some("42501"), "{forbidden}");
        }
        Ok(())
    })
    .await;
    role.drop().await;
}

#[tokio::test]
async fn whoever_grants_leases_needs_these_rights() {
    each_right_is_needed("shop_issuer", async |pool| {
        let fence = Fence::new(pool.clone());
        fence.migrate().await?;
        let leases = RedisLeases::builder(fence.clone()).key_prefix(fresh_prefix());
        let leases = leases.connect(&shared_url()).await?.announced_to(fence);
        let name = new_resource();
        for _ in 0..2 {
            let lease = leases
                .acquire(&name, Acquire::new(Duration::from_secs(30)))
                .await?;
            leases.release(&name, &lease.id).await?;
            forget(&pool, &name).await?;
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn whoever_grants_leases_in_postgres_needs_these_rights() {
    each_right_is_needed("shop_lessor", async |pool| {
        let leases = PostgresLeases::new(Fence::new(pool.clone()));
        let (name, short) = (new_resource(), Duration::from_millis(200));
        let lease = leases
            .acquire(&name, Acquire::new(Duration::from_secs(30)))
            .await?;
        let in_vain = leases.acquire(&name, Acquire::new(short).wait(short)).await;
        if !matches!(in_vain, Err(LeaseError::Held { .. })) {
            return Err(format!("{in_vain:?}").into());
        }
        let renew = Renew::new(short).with_new_token();
        leases.renew(&name, &lease.id, renew).await?;
        leases.list(10, None).await?;
        leases.release(&name, &lease.id).await?;
        // What an issuer calls now and then, or in a process that goes away.
        for call in ["fence_lease_open('{a}')", "fence_lease_sweep()"] {
            let call = sqlx::AssertSqlSafe(format!("SELECT {call}"));
            sqlx::query(call).execute(&pool).await?;
        }
        let abandon = "SELECT fence_lease_abandon($1, '', 1), fence_lease_call($1)";
        sqlx::query(abandon)
            .bind(name.as_str())
            .execute(&pool)
            .await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn whoever_takes_leases_through_the_functions_needs_these_rights() {
    each_right_is_needed("shop_holder", async |pool| {
        let name = new_resource();
        let acquire = "SELECT lease_id FROM fence_acquire($1, '30 s')";
        let acquire = sqlx::query_scalar(acquire).bind(name.as_str());
        let lease_id: String = acquire.fetch_one(&pool).await?;
        for call in ["fence_renew($1, $2, '30 s')", "fence_release($1, $2)"] {
            let call = sqlx::AssertSqlSafe(format!("SELECT {call}"));
            let call = sqlx::query(call).bind(name.as_str()).bind(&lease_id);
            call.execute(&pool).await?;
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn whoever_operates_needs_these_rights() {
    each_right_is_needed("shop_operator", async |pool| {
        let fence = Fence::new(pool.clone());
        let name = new_resource();
        fence.inspect(&name).await?;
        // Above all epochs that this is about to use up.
        fence.reset(&name, token(900_000_000_000_005)).await?;
        fence.notice_failover(true).await?;
        fence.after_failover().await?;
        sqlx::query("SELECT fence_after_failover()")
            .execute(&pool)
            .await?;
        fence.remove_idle(Duration::from_secs(3_600), 10).await?;
        sqlx::query("SELECT fence_remove_idle('90 days', 1000)")
            .execute(&pool)
            .await?;
        fence.remove_expired_keys().await?;
        for statement in [
            "SELECT fence_break('sku-1')",
            "SELECT fence_bypass('a row is mended by hand')",
            "SELECT * FROM fence_held_leases",
            "SELECT * FROM fence_protected",
        ] {
            sqlx::query(statement).execute(&pool).await?;
        }
        Ok(())
    })
    .await;
}
