//! Leases as SQL functions: a script that takes a lease, and the refusals of the functions.

use std::{io::Write, process::Stdio, time::Duration};

use axum::{Router, body::Body, http::Request};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Postgres};
use tower::ServiceExt;
use tower_fence::{
    TokenUse, issuer,
    lease::{Acquire, LeaseId, Leases, PostgresLeases},
};

use crate::{
    contract::json as body_of,
    support::{
        database::{Fresh, TestDatabase, read},
        fence::token,
        functions::{
            acquire, acquire_as, admit, admit_reusable, is_refused, raise, release, renew,
        },
        lease::{LONG, grant, is_held, join, renew_for, sku},
        process::psql,
        template,
    },
};

const ID: &str = "an-id-that-the-client-chose";

/// Runs a script with psql. Returns its output and its errors.
fn run_script(url: &str, script: &str) -> (String, String) {
    let mut command = psql(url);
    let command = command.args(["--no-align", "--tuples-only"]);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut psql = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = psql.stdin.take().unwrap();
    stdin.write_all(script.as_bytes()).unwrap();
    drop(stdin);
    let output = psql.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr))
}

#[tokio::test]
async fn page_of_leases_does_not_read_the_other_leases() {
    let db = Postgres::fresh(1).await;
    let page = "EXPLAIN (COSTS off) SELECT * FROM tower_fence.held_leases WHERE resource > 'a' \
                ORDER BY resource LIMIT 10";
    let mut conn = db.pool.acquire().await.unwrap();
    Postgres::run(&mut conn, "SET enable_seqscan = off").await;
    let plan = sqlx::query_scalar::<_, String>(page).fetch_all(&mut *conn);
    let plan = plan.await.unwrap();
    // A sort, or a scan of a subquery, would read all leases.
    assert!(plan[1].contains("Index Scan"), "{plan:#?}");
}

#[tokio::test]
async fn script_that_loses_its_lease_is_stopped() {
    let db = Postgres::fresh(2).await;
    let script = "
        SELECT token, lease_id FROM tower_fence.acquire('sku-1', '2 s', owner => 'a script') \\gset
        SELECT owner FROM tower_fence.held_leases;
        BEGIN;
        SELECT tower_fence.admit('sku-1', :token, reusable => true) > 0;
        INSERT INTO ledger VALUES (1);
        COMMIT;
        SELECT pg_sleep(2.1);
        SELECT token AS next FROM tower_fence.acquire('sku-1', '30 s') \\gset
        SELECT :next > :token;
        \\set ON_ERROR_STOP on
        BEGIN;
        SELECT tower_fence.admit('sku-1', :token);
        INSERT INTO ledger VALUES (2);
        COMMIT;
    ";
    let (stdout, stderr) = run_script(&db.url, script);
    assert_eq!(stdout, "a script\nt\n\nt\n", "{stderr}");
    assert_contains!(stderr, "was superseded or used already");
    assert_eq!(db.entries().await, 1);
    // The store sees the lease as well.
    let leases = PostgresLeases::new(db.fence());
    is_held(leases.acquire(&sku(), Acquire::new(LONG)).await);
}

/// Runs the script of the guide after settings with which psql would continue after a refusal.
#[tokio::test]
async fn script_of_the_guide_commits_nothing_after_a_refusal() {
    let db = Postgres::fresh(2).await;
    let set_up = "CREATE TABLE inventory (sku text PRIMARY KEY, stock bigint NOT NULL); \
         INSERT INTO inventory VALUES ('sku-1', 10)";
    db.execute(set_up).await;
    let guide = include_str!("../../../src/docs/guide/leases-in-sql.md");
    let (_, script) = guide.split_once("```text\n").unwrap();
    let (script, _) = script.split_once("```").unwrap();
    let other_holder = "SELECT tower_fence.break_lease('sku-1');
        SELECT token AS next FROM tower_fence.acquire('sku-1', '30 s') \\gset
        BEGIN;";
    let settings = "\\set ON_ERROR_STOP off\n\\set ON_ERROR_ROLLBACK on\n";
    let late = script.replace("BEGIN;", other_holder);
    let (_, stderr) = run_script(&db.url, &format!("{settings}{late}"));
    assert_contains!(stderr, "was superseded or used already");
    let stock = "SELECT stock FROM inventory";
    assert_eq!(db.number(stock).await, 10);

    let free = "SELECT tower_fence.break_lease('sku-1');";
    let (_, stderr) = run_script(&db.url, &format!("{free}\n{script}"));
    assert_eq!((stderr.as_str(), db.number(stock).await), ("", 9));
}

#[tokio::test]
async fn the_functions_and_the_store_have_the_same_leases() {
    let db = Postgres::fresh(2).await;
    let leases = PostgresLeases::new(db.fence());
    let mut conn = db.pool.acquire().await.unwrap();
    let mut own = async || {
        acquire_as(&mut conn, "sku-1", "60 s", Some(ID))
            .await
            .unwrap()
    };
    let (first, again) = (own().await, own().await);
    assert_eq!(first.lease_id, ID);
    assert_eq!(again.token, first.token);
    let id = LeaseId::new(ID).unwrap();
    let request = Acquire::new(LONG).lease_id(id.clone());
    let same = leases.acquire(&sku(), request).await.unwrap();
    assert_eq!(same.token.get(), first.token);
    leases.release(&sku(), &id).await.unwrap();

    let second = grant(&leases, &sku(), LONG).await;
    assert!(second.token.get() > first.token);
    let id = second.id.expose();
    let kept = renew(&mut conn, "sku-1", id, "60 s", false).await.unwrap();
    assert_eq!(kept, second.token.get());
    let renewed = renew(&mut conn, "sku-1", id, "60 s", true).await.unwrap();
    assert!(renewed > kept);
    is_refused(admit(&mut conn, "sku-1", kept).await, "TF412");
    release(&mut conn, "sku-1", id).await.unwrap();
    assert_eq!(leases.inspect(&sku()).await.unwrap(), None);

    // A generated lease id has 128 bits, and is unique.
    let drawn = acquire(&mut conn, "a", "1 s").await.unwrap();
    let other = acquire(&mut conn, "b", "1 s").await.unwrap();
    assert!(LeaseId::new(&drawn.lease_id).is_ok() && drawn.lease_id.len() == 32);
    assert_ne!(drawn.lease_id, other.lease_id);
    // No table and no view contains the lease id.
    for table in ["tower_fence.leases", "tower_fence.held_leases"] {
        let rows = format!("SELECT string_agg(t::text, '') FROM {table} AS t");
        let rows: String = read(&mut *conn, &rows).await;
        assert!(!rows.contains(&drawn.lease_id));
    }
    let columns = "information_schema.columns \
         WHERE table_name = 'held_leases' AND column_name LIKE '%lease%'";
    assert_eq!(db.count(columns).await, 0, "the hash is readable");
}

/// The uses of a token that leave `max_token` one below the token.
const USES: [&str; 5] = ["function", "raise", "transaction", "statement", "key"];

async fn use_foreign(db: &Fresh<Postgres>, way: &str, value: i64) {
    let (fence, mut conn) = (db.fence(), db.pool.acquire().await.unwrap());
    let (sku, reusable) = (sku(), TokenUse::Reusable);
    match way {
        "function" => drop(admit_reusable(&mut conn, "sku-1", value).await.unwrap()),
        "raise" => drop(raise(&mut conn, "sku-1", value).await.unwrap()),
        "transaction" => {
            let tx = fence.begin(&sku, token(value), reusable).await.unwrap();
            tx.commit().await.unwrap();
        }
        "statement" => {
            let insert = sqlx::query("INSERT INTO ledger SELECT $1 FROM fence RETURNING entry");
            let written = fence.write(&sku, token(value), reusable, insert.bind(value));
            let written: Vec<(i64,)> = written.await.unwrap();
            assert_eq!(written, [(value,)]);
        }
        _ => {
            let admit = format!(
                "SELECT outcome FROM tower_fence.admit_once(sha256('{value}'), 'key', \
                 sha256(''), 60000, '1s', false, 'sku-1', {value}, true)"
            );
            let outcome: String = read(&mut *conn, &admit).await;
            assert_eq!(outcome, "admitted");
        }
    }
}

#[tokio::test]
async fn next_foreign_token_ends_a_lease() {
    let db = Postgres::fresh(4).await;
    let mut conn = db.pool.acquire().await.unwrap();
    for way in USES {
        // On a distributed fence, `admit_once` claims only a key.
        if way == "key" && !template::workers().is_empty() {
            continue;
        }
        for new_token in [false, true] {
            let held = acquire(&mut conn, "sku-1", "60 s").await.unwrap();
            use_foreign(&db, way, held.token + 1).await;
            let refused = is_refused(admit(&mut conn, "sku-1", held.token).await, "TF412");
            let members = ["max_token", "used"].map(|name| refused.problem[name].clone());
            assert_eq!(members, [json!(held.token), json!(false)], "{way}");
            let renewed = renew(&mut conn, "sku-1", &held.lease_id, "60 s", new_token).await;
            assert_eq!(renewed.unwrap_err().code, "TF410", "{way} {new_token}");
            // The error has rolled back the end of the lease.
            Postgres::run(&mut conn, "SELECT tower_fence.break_lease('sku-1')").await;
        }
    }
}

#[tokio::test]
async fn refusals_have_the_members_of_the_issuers_problems() {
    let db = Postgres::fresh(3).await;
    let app: Router = issuer::router(PostgresLeases::new(db.fence()));
    let answer = async |method: &str, body: Value| -> Value {
        let request = Request::builder()
            .method(method)
            .uri("/sku-1")
            .header("Content-Type", "application/json")
            .header("Lease-Id", ID);
        let request = request.body(Body::from(body.to_string())).unwrap();
        body_of(app.clone().oneshot(request).await.unwrap()).await
    };
    let mut conn = db.pool.acquire().await.unwrap();
    // A lost lease.
    let expected = answer("PUT", json!({})).await;
    for refused in [
        renew(&mut conn, "sku-1", ID, "1 s", false).await.map(drop),
        renew(&mut conn, "sku-1", ID, "1 s", true).await.map(drop),
        release(&mut conn, "sku-1", ID).await,
    ] {
        let refused = is_refused(refused, "TF410");
        assert_eq!(refused.problem, json!({ "resource": expected["resource"] }));
        assert_eq!(refused.message, expected["detail"]);
    }
    // A held lease.
    acquire(&mut conn, "sku-1", "60 s").await.unwrap();
    let mut expected = answer("POST", json!({})).await;
    let mut refused = is_refused(acquire(&mut conn, "sku-1", "1 s").await, "TF409");
    for problem in [&mut expected, &mut refused.problem] {
        let retry_after = problem["retry_after_ms"].take().as_i64().unwrap();
        assert!((50_000..=60_000).contains(&retry_after), "{retry_after}");
    }
    let members = ["resource", "retry_after_ms"].map(|name| (name, expected[name].clone()));
    assert_eq!(refused.problem, Value::from_iter(members));
    // An exhausted token range.
    Postgres::run(&mut conn, "SELECT tower_fence.break_lease('sku-1')").await;
    let last = 999_999_999_999_999_i64;
    admit(&mut conn, "sku-1", last).await.unwrap();
    let expected = answer("POST", json!({})).await;
    let refused = is_refused(acquire(&mut conn, "sku-1", "1 s").await, "TF411");
    let members = ["resource", "max_token"].map(|name| (name, expected[name].clone()));
    assert_eq!(refused.problem, Value::from_iter(members));
    assert_eq!(expected["max_token"], last);
    // Invalid requests.
    for (resource, ttl, id, code) in [
        ("", "1 s", ID, "TF400"),
        ("sku-1", "0 s", ID, "TF422"),
        ("sku-1", "-1 s", ID, "TF422"),
        ("sku-1", "36526 days", ID, "TF422"),
        ("sku-1", "1000 years", ID, "TF422"),
        ("sku-1", "1 s", "short", "TF422"),
        ("sku-1", "1 s", "an id that has spaces in it", "TF422"),
    ] {
        let refused = acquire_as(&mut conn, resource, ttl, Some(id)).await;
        let refused = is_refused(refused, code);
        assert!(!refused.message.contains(id), "{refused:?}");
    }
    // 100 years.
    let longest = acquire_as(&mut conn, "sku-2", "36525 days", Some(ID)).await;
    longest.unwrap();
}

#[tokio::test]
async fn drivers_need_neither_intervals_nor_void() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let mut lease = async |sql: &str| -> Result<(String, i64), String> {
        let lease = sqlx::query_as(AssertSqlSafe(sql.to_owned())).bind("sku-1");
        let lease = lease.bind(60_000_i64).fetch_one(&mut *conn).await;
        let code = |error: &sqlx::Error| Some(error.as_database_error()?.code()?.into_owned());
        lease.map_err(|error| code(&error).unwrap())
    };
    let granted = lease("SELECT * FROM tower_fence.acquire($1, ttl_ms => $2)").await;
    let (id, token) = granted.unwrap();
    let renew = format!("SELECT '{id}', tower_fence.renew($1, '{id}', ttl_ms => $2)");
    assert_eq!(lease(&renew).await.unwrap().1, token);
    for refused in [
        "SELECT * FROM tower_fence.acquire($1, '1 s', ttl_ms => $2)",
        "SELECT * FROM tower_fence.acquire($1, ttl_ms => -$2)",
        "SELECT * FROM tower_fence.acquire($1, ttl_ms => $2 * 1000000000)",
        "SELECT * FROM tower_fence.acquire($1, CASE WHEN $2 = 0 THEN interval '1 s' END)",
    ] {
        assert_eq!(lease(refused).await.unwrap_err(), "TF422", "{refused}");
    }
    let release = format!("SELECT tower_fence.release('sku-1', '{id}')");
    let released: bool = read(&db.pool, &release).await;
    assert!(released);
    let functions = "pg_proc WHERE pronamespace = 'tower_fence'::regnamespace AND prokind = 'f'";
    assert!(db.count(functions).await > 50);
    let void = format!("{functions} AND prorettype = 'void'::regtype");
    assert_eq!(db.count(&void).await, 0);
}

/// The digest that a writer can read in `resources` cannot release a lease. A missing digest cannot
/// either.
#[tokio::test]
async fn no_readable_digest_ends_a_lease() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let held = acquire(&mut conn, "sku-1", "60 s").await.unwrap();
    for lease in [
        "(SELECT announced_lease FROM tower_fence.resources WHERE resource = 'sku-1')",
        "NULL",
    ] {
        let call = format!("SELECT tower_fence.lease_end('sku-1', {lease})");
        Postgres::run(&mut conn, &call).await;
        let kept = renew(&mut conn, "sku-1", &held.lease_id, "60 s", false).await;
        assert_eq!(kept.unwrap(), held.token, "{lease}");
    }
    // A repeated announcement is still recognized.
    let again = acquire_as(&mut conn, "sku-1", "60 s", Some(&held.lease_id)).await;
    assert_eq!(again.unwrap().token, held.token);
    admit(&mut conn, "sku-1", held.token).await.unwrap();
    // A write has used up the token.
    let again = acquire_as(&mut conn, "sku-1", "60 s", Some(&held.lease_id)).await;
    assert!(again.unwrap().token > held.token);
}

/// A statement that moves the expiry of all leases an hour ahead, as if the wall clock had been set
/// back by an hour.
const PUT_BACK: &str = "UPDATE tower_fence.leases SET expires_at = expires_at + interval '1 hour'";

#[tokio::test]
async fn wall_clock_set_back_extends_no_lease() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    let short = Duration::from_secs(2);
    let asked = Acquire::new(LONG).wait(Duration::from_secs(20));
    // The lease is held in the first round, and released in the second one.
    for released in [false, true] {
        let first = grant(&leases, &sku(), short).await;
        if released {
            leases.release(&sku(), &first.id).await.unwrap();
        }
        db.execute(PUT_BACK).await;
        let left = leases.inspect(&sku()).await.unwrap().map(|held| held.ttl);
        assert!(left <= Some(short), "{left:?}");
        let next = leases.acquire(&sku(), asked.clone()).await.unwrap();
        assert!(next.token > first.token);
        leases.release(&sku(), &next.id).await.unwrap();
    }
    // After a renewal, the lease does not last longer than its new TTL either.
    let held = grant(&leases, &sku(), short).await;
    db.execute(PUT_BACK).await;
    let open = "SELECT cardinality(tower_fence.lease_open(ARRAY['sku-1'], 1))::bigint";
    assert_eq!(db.number(open).await, 1, "no waiter would retry");
    renew_for(&leases, &held, LONG).await;
    let left = leases.inspect(&sku()).await.unwrap().unwrap().ttl;
    assert!(left <= LONG && left > short, "{left:?}");
    // A request is in the queue when the clock is set back.
    renew_for(&leases, &held, short).await;
    let waits = join(&leases, asked).await;
    db.execute(PUT_BACK).await;
    assert!(waits.await.unwrap().unwrap().token > held.token);
}
