//! Runs the vectors of the contract through the functions in Postgres, and compares their refusals
//! with those of the layer.

use axum::{
    Router,
    body::Body,
    http::{Request, header::HeaderValue},
    routing::post,
};
use serde_json::{Value, json as object};
use sqlx::{Acquire, Postgres};
use tower::ServiceExt;
use tower_fence::{FenceLayer, PathParam, Resource};

use super::{
    admission::{AdmissionVectors, Ends, Outcome, Step, Use, age, begin_at, run},
    json, resource,
    tokens::{Name, ResourceVectors},
    vectors,
};
use crate::support::{
    database::TestDatabase,
    functions::{Refused, admit, admit_reusable, is_refused, max_token, raise, refuses},
};

#[tokio::test]
async fn functions_admit_the_same_sequences() {
    let db = Postgres::fresh(2).await;
    let fence = db.fence();
    let vectors: AdmissionVectors = vectors("admission.json");
    let mut steps_of_functions = 0;
    for sequence in vectors.sequences {
        let name = resource(&sequence.name);
        begin_at(&fence, &name, sequence.initial).await;
        for step in sequence.steps_of::<Postgres>() {
            let mut conn = db.pool.acquire().await.unwrap();
            let (found, expected, left) = match step {
                Step::Write {
                    token,
                    token_use,
                    ends,
                    outcome,
                    max_token,
                } => {
                    let mut tx = conn.begin().await.unwrap();
                    let admitted = match token_use {
                        Use::SingleUse => admit(&mut tx, name.as_str(), token).await,
                        Use::Reusable => admit_reusable(&mut tx, name.as_str(), token).await,
                    };
                    if ends == Ends::Commit && admitted.is_ok() {
                        tx.commit().await.unwrap();
                        assert_eq!(admitted.as_ref().ok(), max_token.as_ref(), "{name}");
                    } else {
                        tx.rollback().await.unwrap();
                    }
                    (outcome_of(admitted, Outcome::Admitted), outcome, max_token)
                }
                Step::Raise {
                    token,
                    outcome,
                    max_token,
                } => {
                    let raised = raise(&mut conn, name.as_str(), token).await;
                    if let Ok(raised) = raised {
                        assert_eq!(Some(raised), max_token, "{name}");
                    }
                    (outcome_of(raised, Outcome::Raised), outcome, max_token)
                }
                Step::Announce { .. } => {
                    run(&fence, &name, &step).await;
                    continue;
                }
                Step::Remove { max_token } => {
                    age(&fence, &name).await;
                    let remove = "CALL tower_fence.remove_idle('1 hour', 10)";
                    let removed = Postgres::number(&mut conn, remove).await.unwrap();
                    assert_eq!(removed, 1, "{name}");
                    (Outcome::Removed, Outcome::Removed, max_token)
                }
            };
            steps_of_functions += 1;
            assert_eq!(found, expected, "{name}: {step:?}");
            let found = max_token(&mut conn, name.as_str()).await.unwrap();
            assert_eq!(found, left, "{name}: {step:?}");
        }
    }
    assert!(steps_of_functions > 30, "{steps_of_functions}");
}

fn outcome_of(result: Result<i64, Refused>, success: Outcome) -> Outcome {
    match result {
        Ok(_) => success,
        refused => {
            is_refused(refused, "TF412");
            Outcome::Stale
        }
    }
}

#[tokio::test]
async fn functions_and_crate_accept_the_same_names() {
    let db = Postgres::fresh(1).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let names: ResourceVectors = vectors("resources.json");
    for name in names.valid.iter().map(Name::text) {
        let seen = max_token(&mut conn, name.as_str()).await.unwrap();
        assert_eq!(seen, None, "{name:?}");
        assert_eq!(raise(&mut conn, name.as_str(), 5).await.unwrap(), 4);
        assert_eq!(admit(&mut conn, name.as_str(), 5).await.unwrap(), 5);
        let seen = max_token(&mut conn, name.as_str()).await.unwrap();
        assert_eq!(seen, Some(5), "{name:?}");
    }
    for name in names.invalid.iter().map(Name::text) {
        let refusals = [
            admit(&mut conn, name.as_str(), 5).await,
            raise(&mut conn, name.as_str(), 5).await,
            max_token(&mut conn, name.as_str())
                .await
                .map(Option::unwrap_or_default),
        ];
        for refused in refusals {
            // A text in Postgres cannot contain this character, so the function is not called.
            if name.contains('\0') {
                is_refused(refused, "22021");
                continue;
            }
            let refused = is_refused(refused, "TF400");
            let expected = Resource::new(&name).unwrap_err().to_string();
            assert_eq!(refused.message, expected);
        }
    }
    // These characters include all control characters.
    for code in (1..0x100).filter_map(char::from_u32) {
        let name = format!("x{code}y");
        let admitted = admit(&mut conn, name.as_str(), 5).await;
        assert_eq!(admitted.is_ok(), Resource::new(&name).is_ok(), "{name:?}");
    }
    drop(conn);
    let rows = db.count("tower_fence.resources WHERE resource ~ '[[:cntrl:]]'");
    assert_eq!(rows.await, 0);
}

#[tokio::test]
async fn sql_refusals_have_the_members_of_layer_problems() {
    let db = Postgres::fresh(2).await;
    let fence = db.fence();
    let app: Router = Router::new()
        .route("/{sku}", post(|| async {}))
        .route_layer(FenceLayer::new(fence.clone(), PathParam("sku")));
    let answer = async |field: &str| -> Value {
        let request = Request::post("/sku-1").header(
            "Fencing-Token",
            HeaderValue::from_str(field).expect("an invalid header value"),
        );
        let response = app.clone().oneshot(request.body(Body::empty()).unwrap());
        json(response.await.unwrap()).await
    };
    begin_at(&fence, &resource("sku-1"), Some(42)).await;
    let mut conn = db.pool.acquire().await.unwrap();

    for token in [42, 41, 1] {
        let expected = answer(&token.to_string()).await;
        for (refused, used) in [
            (admit(&mut conn, "sku-1", token).await, token == 42),
            (admit_reusable(&mut conn, "sku-1", token).await, false),
            (raise(&mut conn, "sku-1", token).await, false),
        ] {
            let refused = is_refused(refused, "TF412");
            let facts = object!({
                "resource": "sku-1", "presented_token": token, "max_token": 42, "used": used, "by_floor": false,
            });
            assert_eq!(refused.problem, facts);
            for member in ["resource", "presented_token", "max_token"] {
                assert_eq!(refused.problem[member], expected[member]);
            }
            let message = if used {
                "token 42 for sku-1 was used already".to_owned()
            } else if token == 42 {
                "token 42 for sku-1 was superseded or used already".to_owned()
            } else {
                format!("token {token} for sku-1 is not newer than 42")
            };
            assert_eq!(refused.message, message);
            assert!(!refused.hint.is_empty(), "{refused:?}");
        }
    }
    for token in [0, -1, -999_999_999_999_999] {
        let expected = answer(&token.to_string()).await;
        for refused in [
            admit(&mut conn, "sku-1", token).await,
            raise(&mut conn, "sku-1", token).await,
        ] {
            let refused = is_refused(refused, "TF400");
            assert_eq!(refused.problem, Value::Null);
            assert_eq!(refused.message, expected["detail"]);
        }
    }
    let too_long = "x".repeat(256);
    for (name, field) in [
        ("", r#"50;resource="""#.to_owned()),
        ("a\tb", r#"50;resource=%"a%09b""#.to_owned()),
        ("\u{85}", r#"50;resource=%"%c2%85""#.to_owned()),
        (&too_long, format!(r#"50;resource="{too_long}""#)),
    ] {
        let expected = answer(&field).await;
        let refused = is_refused(admit(&mut conn, name, 50).await, "TF400");
        assert_eq!(refused.message, expected["detail"], "{name:?}");
    }
    // These tokens cannot occur in a field.
    let beyond = Some(1_000_000_000_000_000);
    for token in [None, beyond, Some(i64::MIN), Some(i64::MAX)] {
        let shown = token.map_or("null".to_owned(), |token| token.to_string());
        for refused in [
            admit(&mut conn, "sku-1", token).await,
            raise(&mut conn, "sku-1", token).await,
            admit(&mut conn, None, token).await,
        ] {
            let refused = is_refused(refused, "TF400");
            let expected = format!(
                "a fencing token must be an integer from 1 to 999999999999999, not {shown}"
            );
            assert_eq!(refused.message, expected);
        }
    }
    is_refused(admit(&mut conn, None, 50).await, "TF400");
    is_refused(raise(&mut conn, None, 50).await, "TF400");
    is_refused(max_token(&mut conn, None).await, "TF400");
    // No refusal has changed the fence.
    assert_eq!(max_token(&mut conn, "sku-1").await.unwrap(), Some(42));
}

/// Arguments that the crate never passes. Each is refused with a hint, and with its own SQLSTATE.
#[tokio::test]
async fn arguments_out_of_range_are_refused() {
    let db = Postgres::fresh(1).await;
    let mut conn = db.pool.acquire().await.unwrap();
    // The resource has a row, which a statement could update before the token is checked.
    raise(&mut conn, "a", 1).await.unwrap();
    let once = |key: &str, ttl_ms: &str, resource: &str, token: &str| {
        format!(
            "admit_once(sha256(''), {key}, sha256(''), {ttl_ms}, '1s', true, {resource}, {token}, false)"
        )
    };
    let ask = |resource: &str, lease: &str, ttl_ms: &str, delay_ms: &str, ticket: &str| {
        format!("lease_ask({resource}, {lease}, {ttl_ms}, {delay_ms}, NULL, {ticket}, false, 1)")
    };
    let mut calls = vec![];
    for token in ["NULL", "0", "(-9223372036854775808)", "1000000000000000"] {
        calls.push((format!("try_admit('a', {token}, false)"), "TF400"));
        calls.push((format!("try_raise('a', {token})"), "TF400"));
        calls.push((format!("announce('a', {token}, '')"), "TF400"));
        calls.push((once("'k'", "1", "'a'", token), "TF400"));
    }
    for resource in ["NULL", "''", "E'a\\tb'", "repeat('x', 256)"] {
        for call in [
            format!("try_admit({resource}, 5, false)"),
            format!("try_raise({resource}, 5)"),
            format!("catch_up({resource})"),
            format!("renew({resource}, repeat('x', 22), '1 s')"),
            format!("release({resource}, repeat('x', 22))"),
            once("'k'", "1", resource, "5"),
            ask(resource, "''", "1", "0", "1"),
        ] {
            calls.push((call, "TF400"));
        }
    }
    for partition in ["NULL", "-1", "256"] {
        for (call, others) in [
            ("catch_up_partition", ""),
            ("next_epoch", ", 1"),
            ("report_epoch", ", 1"),
            ("remove_idle_of", ", '1 day', 1, NULL, NULL"),
        ] {
            calls.push((format!("{call}({partition}::smallint{others})"), "22023"));
        }
    }
    for (key, ttl_ms) in [
        ("NULL", "1"),
        ("repeat('x', 256)", "1"),
        ("'k'", "NULL"),
        ("'k'", "0"),
    ] {
        calls.push((once(key, ttl_ms, "'a'", "5"), "22023"));
    }
    for (lease, ttl_ms, delay_ms, ticket) in [
        ("NULL", "1", "0", "1"),
        ("''", "NULL", "0", "1"),
        ("''", "0", "0", "1"),
        ("''", "1", "-1", "1"),
        ("''", "1", "NULL", "1"),
        ("''", "9223372036854775807", "0", "1"),
        ("''", "1", "0", "NULL"),
    ] {
        calls.push((ask("'a'", lease, ttl_ms, delay_ms, ticket), "22023"));
    }
    for number in ["NULL", "0", "2000"] {
        calls.push((format!("after_failover({number})"), "22023"));
    }
    calls.push(("lease_renew('a', '', NULL, false, NULL)".into(), "22023"));
    calls.push(("report_epoch(7::smallint, 1000000)".into(), "22023"));
    calls.push(("report_epoch(7::smallint, NULL)".into(), "22004"));
    calls.push(("next_epoch(7::smallint, NULL)".into(), "22004"));
    for (call, code) in [
        ("renew('a', NULL, '1 s')", "TF422"),
        ("renew('a', repeat('x', 22), NULL)", "TF422"),
        ("renew('a', repeat('x', 22), '1 s', ttl_ms => 1)", "TF422"),
        ("renew('a', repeat('x', 21), '1 s')", "TF422"),
        ("renew('a', repeat('x', 65), '1 s')", "TF422"),
        ("acquire('a', '1 s', owner => E'a\\nb')", "TF422"),
        ("acquire('a', '1 s', owner => repeat('x', 256))", "TF422"),
        ("release('a', repeat('x', 22))", "TF410"),
        ("admit_header('5;resource=\"b\"', 'a')", "TF403"),
        ("admit_header(NULL, 'a')", "TF400"),
    ] {
        calls.push((call.into(), code));
    }
    for (call, code) in calls {
        let call = format!("SELECT tower_fence.{call}");
        let refused = refuses(&mut conn, &call, code).await;
        let has_hint = !refused.hint.is_empty();
        assert!(code.starts_with("22") || has_hint, "{call}");
        if code == "TF403" {
            assert_eq!(refused.problem, object!({ "resource": "a" }));
        }
    }
    for (prepare, name, code) in [
        ("acquire('a', '1 s')", "a", "TF409"),
        (
            "acquire('c', '1 ms', lock_delay => '1 h'), pg_sleep(0.01)",
            "c",
            "TF409",
        ),
        ("admit('b', 999999999999999)", "b", "TF411"),
    ] {
        Postgres::run(&mut conn, &format!("SELECT tower_fence.{prepare}")).await;
        let acquire = format!("SELECT tower_fence.acquire('{name}', '1 s')");
        let refused = refuses(&mut conn, &acquire, code).await;
        assert!(!refused.hint.is_empty(), "{code}");
    }
    // If an epoch existed, a failover would make the tokens of other issuers stale.
    Postgres::run(&mut conn, "SELECT tower_fence.report_epoch(7::smallint, 0)").await;
    let epochs = "SELECT count(*) FROM tower_fence.epochs WHERE partition = 7 AND epoch > 0";
    assert_eq!(Postgres::number(&mut conn, epochs).await.unwrap(), 0);
    // As documented, this number means that no epoch is left.
    for at_least in ["1000000", "9223372036854775807"] {
        let next = format!("SELECT tower_fence.next_epoch(7::smallint, {at_least})");
        let next = Postgres::number(&mut conn, &next).await.unwrap();
        assert_eq!(next, 1_000_000);
    }
}

/// A transaction that claimed a key and was committed manually leaves the key without a response.
#[tokio::test]
async fn only_the_claiming_transaction_stores_a_response() {
    let db = Postgres::fresh(1).await;
    let mut conn = db.pool.acquire().await.unwrap();
    const CLAIM: &str = "SELECT tower_fence.admit_once(sha256(''), 'k', sha256(''), 60000, '1s', false, 'a', 5, true)";
    const STORE: &str =
        "SELECT tower_fence.store_response(sha256(''), 'k', 200::smallint, '', '')::int::bigint";
    Postgres::run(&mut conn, &format!("BEGIN; {CLAIM}; COMMIT")).await;
    assert_eq!(Postgres::number(&mut conn, STORE).await.unwrap(), 0);
    let expire = "UPDATE tower_fence.idempotency_keys SET expires_at = now()";
    Postgres::run(&mut conn, expire).await;
    // The crate claims a key after its savepoint.
    Postgres::run(&mut conn, &format!("BEGIN; SAVEPOINT s; {CLAIM}")).await;
    for stored in [1, 0] {
        assert_eq!(Postgres::number(&mut conn, STORE).await.unwrap(), stored);
    }
    Postgres::run(&mut conn, "COMMIT").await;
}

/// The time of a transaction that began before the last write to a resource would be earlier than
/// the time of that write.
#[tokio::test]
async fn a_claim_admits_no_token_in_a_transaction_from_before_the_last_write() {
    let db = Postgres::fresh(2).await;
    let mut early = db.pool.acquire().await.unwrap();
    const CLAIM: &str = "SELECT (a.outcome = 'early')::int::bigint FROM \
         tower_fence.admit_once(sha256(''), 'k', sha256(''), 60000, '1s', true, 'a', 5, true) AS a";
    admit(&mut early, "a", 1).await.unwrap();
    for (writes_between, is_early) in [(false, 0), (true, 1)] {
        Postgres::run(&mut early, "BEGIN").await;
        if writes_between {
            let mut other = db.pool.acquire().await.unwrap();
            admit(&mut other, "a", 2).await.unwrap();
        }
        let found = Postgres::number(&mut early, CLAIM).await.unwrap();
        assert_eq!(found, is_early);
        Postgres::run(&mut early, "ROLLBACK").await;
    }
}
