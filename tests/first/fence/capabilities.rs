//! What a fence does on a database that speaks the protocol of Postgres and is none.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use sqlx::{Postgres, postgres::PgPoolOptions};
use tokio::time::{Instant, timeout};
use tower_fence::{
    AdmitError, Fence, Resource, TokenUse,
    announce::{Announce, LeaseDigest},
};

use crate::support::{
    database::TestDatabase,
    eventually,
    fence::{begin, sku, token, write},
    proxy::{Passage, Proxy, Sender},
    variant::Variant,
};

const INSERT: &str = "INSERT INTO ledger SELECT 1 FROM fence RETURNING entry";

/// Whether a write was one statement with its admission: an open transaction of the fence has a limit for idle
/// times, which no session has by itself.
async fn is_at_once(fence: &Fence<Postgres>) -> bool {
    let sql = "INSERT INTO ledger SELECT CASE WHEN current_setting('idle_in_transaction_session_timeout') = '0' \
               THEN 1 ELSE 0 END + 10 * (SELECT count(*) FROM ledger) FROM fence RETURNING entry % 10";
    let rows: Vec<(i64,)> = fence
        .write(&sku(), token(7), TokenUse::Reusable, sqlx::query(sql))
        .await
        .unwrap();
    rows[0].0 == 1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_and_write_are_one_statement_only_where_rows_have_versions() {
    for (variant, at_once) in [
        (Variant::Plain, true),
        (Variant::Partitioned, true),
        (Variant::WithoutVersions, false),
        (Variant::Bare, false),
    ] {
        let db = variant.run(Postgres::fresh(2)).await;
        for named in [false, true] {
            let fence = db.fence();
            let fence = if named { fence.schema("public") } else { fence };
            is_at_once(&fence).await;
            assert_eq!(is_at_once(&fence).await, at_once, "{variant:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_no_session_can_be_ended_its_connection_is_closed() {
    for variant in [Variant::WithoutVersions, Variant::Bare] {
        let db = variant.run(Postgres::fresh(3)).await;
        let pool = PgPoolOptions::new().max_connections(1);
        let fence = Fence::new(pool.connect(&db.url).await.unwrap());
        write(&fence, 1).await.unwrap();
        let mut tx = begin(&fence, 2).await;
        let asleep = sqlx::query("SELECT pg_sleep(4)").execute(&mut *tx);
        timeout(Duration::from_millis(100), asleep)
            .await
            .unwrap_err();
        let began = Instant::now();
        drop(tx);
        // The pool has room again, long before the statement ends, and whoever waits for the row has its limit.
        let other = Resource::new("other").unwrap();
        let tx = fence.begin(&other, token(1), TokenUse::SingleUse).await;
        tx.unwrap().commit().await.unwrap();
        assert!(
            began.elapsed() < Duration::from_secs(3),
            "{:?}",
            began.elapsed()
        );
        let impatient = db.fence().lock_wait(Duration::from_millis(100));
        let busy = impatient.begin(&sku(), token(3), TokenUse::SingleUse).await;
        assert!(matches!(busy, Err(AdmitError::Busy(_))), "{busy:?}");
        eventually("the statement has ended by itself", async || {
            write(&db.fence(), 3).await.is_ok()
        })
        .await;
    }
}

/// A right that is missing is no capability that is missing: what it protects is not done without.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_may_not_end_sessions_writes_all_the_same() {
    let db = Postgres::fresh(2).await;
    let role = format!("app_{:016x}", rand::random::<u64>());
    db.execute(&format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'of-a-test'; \
         GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO {role}; \
         REVOKE EXECUTE ON FUNCTION pg_terminate_backend FROM PUBLIC; \
         REVOKE EXECUTE ON FUNCTION fence_history FROM PUBLIC"
    ))
    .await;
    let mut url = reqwest::Url::parse(&db.url).unwrap();
    url.set_username(&role).unwrap();
    url.set_password(Some("of-a-test")).unwrap();
    let pool = PgPoolOptions::new().max_connections(2);
    let fence = Fence::new(pool.connect(url.as_str()).await.unwrap());
    let refused = fence.begin(&sku(), token(1), TokenUse::SingleUse).await;
    assert!(
        matches!(refused, Err(AdmitError::Misconfigured(_))),
        "{refused:?}"
    );
    db.execute(&format!(
        "GRANT EXECUTE ON FUNCTION fence_history TO {role}"
    ))
    .await;
    write(&fence, 1).await.unwrap();
    let sku = sku();
    let written = fence.write::<(i64,)>(&sku, token(2), TokenUse::SingleUse, INSERT);
    written.await.unwrap_err();
    let next = "INSERT INTO ledger SELECT 2 FROM fence RETURNING entry";
    let written = fence.write::<(i64,)>(&sku, token(2), TokenUse::SingleUse, next);
    assert_eq!(written.await.unwrap(), [(2,)]);
    fence.get_pool().close().await;
    db.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await;
}

/// Tables of an older version say nothing about what the server can do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_older_version_lacks_is_looked_for_again() {
    let db = Postgres::fresh(2).await;
    let fence = db.fence();
    db.execute("ALTER TABLE fence_resources RENAME history TO later")
        .await;
    let refused = fence.begin(&sku(), token(1), TokenUse::SingleUse).await;
    assert!(
        matches!(refused, Err(AdmitError::NotMigrated(_))),
        "{refused:?}"
    );
    db.execute("ALTER TABLE fence_resources RENAME later TO history")
        .await;
    write(&fence, 1).await.unwrap();
}

/// The statements in messages of a client, in small letters.
fn statements(mut messages: &[u8]) -> String {
    let mut statements = String::new();
    // A kind, a length that counts itself, and the rest.
    while let [kind, length @ ..] = messages
        && let Some(length) = length.first_chunk()
        && let Some((message, rest)) =
            messages[1..].split_at_checked(u32::from_be_bytes(*length) as usize)
        && let Some(message) = message.get(4..)
    {
        let mut texts = message.split(|byte| *byte == 0);
        let statement = match kind {
            b'Q' => texts.next(),
            // Behind the name of what is prepared.
            b'P' => texts.nth(1),
            _ => None,
        };
        let statement = String::from_utf8_lossy(statement.unwrap_or_default());
        statements.push_str(&statement.to_ascii_lowercase());
        statements.push('\n');
        messages = rest;
    }
    statements
}

/// What the crate's own statements call is in the documentation of what it needs of a database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_function_that_a_request_calls_is_documented() {
    const TEXT: &str = include_str!("../../../src/deployment.md");
    // In every SQL, or behind it: words that stand in front of a parenthesis.
    const PLAIN: &str = " select values exists update insert as and in cast coalesce case then where from fence work on \
        unnest literal returning count current_schemas version nspname name concat \
        string_agg ";
    let (_, section) = TEXT
        .split_once("# What the fence needs of a database")
        .unwrap();
    let (section, _) = section.split_once("## Citus").unwrap();
    let db = Postgres::fresh(2).await;
    let sent = Arc::<Mutex<String>>::default();
    let proxy = {
        let sent = Arc::clone(&sent);
        Proxy::judging(db.addr(), move || {
            let sent = Arc::clone(&sent);
            move |sender: Sender, message: &[u8]| {
                if sender == Sender::Client {
                    sent.lock().unwrap().push_str(&statements(message));
                }
                Passage::Whole
            }
        })
    };
    let proxy = proxy.await;
    let pool = PgPoolOptions::new().max_connections(2);
    let fence = Fence::new(pool.connect(&proxy.url(&db.url)).await.unwrap());
    let sku = sku();
    for value in 1..3 {
        write(&fence, 10 * value).await.unwrap();
        fence.raise(&sku, token(10 * value + 2)).await.unwrap();
        let digest = LeaseDigest::of("the id of a lease");
        fence
            .announce(&sku, token(10 * value + 3), &digest)
            .await
            .unwrap();
        let sql = format!("INSERT INTO ledger SELECT {value} FROM fence RETURNING entry");
        let query = sqlx::query(sqlx::AssertSqlSafe(sql));
        let written =
            fence.write::<(i64,)>(&sku, token(10 * value + 4), TokenUse::SingleUse, query);
        assert_eq!(written.await.unwrap(), [(value,)]);
    }
    let sent = sent.lock().unwrap().clone();
    assert!(
        sent.contains("f.xmin") && sent.contains("for share"),
        "it was recorded"
    );
    let called: BTreeSet<_> = sent
        .match_indices('(')
        .filter_map(|(place, _)| {
            let is_name = |letter: char| letter.is_ascii_lowercase() || letter == '_';
            let name = sent[..place].rsplit(|letter| !is_name(letter)).next()?;
            (!name.is_empty()).then_some(name)
        })
        .collect();
    assert!(
        called.contains("pg_try_advisory_xact_lock_shared"),
        "{called:?}"
    );
    let undocumented = called.iter().filter(|name| {
        let is_plain = PLAIN.split_whitespace().any(|plain| plain == **name);
        !is_plain && !name.starts_with("fence_") && !section.contains(&format!("`{name}"))
    });
    assert_eq!(undocumented.collect::<Vec<_>>(), Vec::<&&str>::new());
}
