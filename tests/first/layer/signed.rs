//! `FenceLayer::verify_with`: each way to block a resource with a forged token, with and without
//! keys. The layer verifies a token before it calls any other component.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode, request::Parts},
    routing::{any, post},
};
use futures_util::{future::pending, stream};
use tokio::time::timeout;
use tower::ServiceExt;
use tower_fence::{
    FenceLayer, FencedTx, Idempotency, InvalidResource, PathParam, PendingWrite, Resource, Token,
    TokenKey, TokenKeys,
    layer::{Refusal, Verification},
};

use crate::{
    contract::resource,
    support::{
        database::{Fresh, TestDatabase, on_both_databases},
        http::{Answer, Server},
    },
};

on_both_databases!(
    forged_number_blocks_a_resource_only_without_verification,
    verification_precedes_all_other_checks,
    repetition_with_a_removed_key_needs_a_new_lease,
    unsigned_tokens_are_accepted_until_they_are_disabled,
);

const LAST: i64 = Token::MAX.get();

fn keys(id: &str) -> TokenKeys {
    TokenKeys::new([TokenKey::random(id).unwrap()]).unwrap()
}

fn signed(keys: &TokenKeys, name: &str, token: i64) -> String {
    let token = Token::new(token).unwrap();
    keys.sign(&resource(name), token).to_string()
}

async fn deferred<DB: TestDatabase>(pending: PendingWrite<DB>) {
    let mut tx = pending.begin().await.unwrap();
    DB::run(&mut tx, "INSERT INTO ledger VALUES (1)").await;
}

async fn at_once<DB: TestDatabase>(pending: PendingWrite<DB>) {
    let insert = "INSERT INTO ledger SELECT 2 FROM fence RETURNING entry";
    pending.write::<()>(insert).await.unwrap();
}

/// Starts a service with each mode of the layer. With `keys`, the layers verify tokens.
async fn start<DB: TestDatabase>(db: &Fresh<DB>, keys: Option<&TokenKeys>) -> Server {
    let one = |layer: FenceLayer<DB, PathParam>| match keys {
        Some(keys) => layer.verify_with(keys.clone()),
        None => layer,
    };
    let several = FenceLayer::new(db.fence(), [PathParam("a"), PathParam("b")]);
    let several = match keys {
        Some(keys) => several.verify_with(keys.clone()),
        None => several,
    };
    let layer = one(FenceLayer::new(db.fence(), PathParam("a")));
    let (in_handler, empty) = (layer.clone().deferred(), || post(|| async {}));
    let keyed = layer.clone().idempotent(Idempotency::required());
    let app = Router::new()
        .route("/write/{a}", post(|_: FencedTx<DB>| async {}))
        .route("/failure/{a}", post(|| async { StatusCode::NOT_FOUND }))
        .route("/read/{a}", any(|| async {}))
        .route_layer(layer.clone())
        .route(
            "/deferred/{a}",
            post(deferred::<DB>).route_layer(in_handler.clone()),
        )
        .route("/at-once/{a}", post(at_once::<DB>).route_layer(in_handler))
        .route(
            "/reusable/{a}",
            empty().route_layer(layer.clone().reusable()),
        )
        .route("/keys/{a}", empty().route_layer(keyed))
        .route("/several/{a}/{b}", empty().route_layer(several));
    Server::start(app).await
}

/// The cases in the documentation of `verify_with`, each with the resource that the attacker wants
/// to block.
const ROUTES: [(&str, &str, &str); 8] = [
    ("POST", "/write/", "a1"),
    ("POST", "/failure/", "a2"),
    ("GET", "/read/", "a3"),
    ("POST", "/deferred/", "a4"),
    ("POST", "/at-once/", "a5"),
    ("POST", "/reusable/", "a6"),
    ("POST", "/keys/", "a7"),
    ("POST", "/several/own/", "a8"),
];

async fn forged_number_blocks_a_resource_only_without_verification<DB: TestDatabase>() {
    let issuer = keys("k1");
    for verifies in [false, true] {
        let db = DB::fresh(2).await;
        let server = start(&db, verifies.then_some(&issuer)).await;
        for (method, path, name) in ROUTES {
            let send = async |field: &str| {
                let own = signed(&issuer, "own", 1_000);
                let field = match path {
                    "/several/own/" => format!("{own}, {field}"),
                    _ => field.to_owned(),
                };
                let url = server.url(&format!("{path}{name}"));
                let request = server.client.request(method.parse().unwrap(), url);
                let request = request.header("Fencing-Token", field);
                Answer::to(request.header("Idempotency-Key", "\"k\"")).await
            };
            let granted = signed(&issuer, name, 5);
            let out_of_the_blue = [
                format!("{LAST};resource=\"{name}\""),
                // Fields that a holder can derive from its own field.
                granted.replace("5;", &format!("{LAST};")),
                signed(&issuer, "own", LAST).replace("own", name),
                // Fields that are signed with another key, under any name.
                signed(&keys("k1"), name, LAST),
                signed(&keys("mine"), name, LAST),
                signed(&issuer.clone().audience("elsewhere"), name, LAST),
            ];
            for field in &out_of_the_blue {
                let answer = send(field).await;
                if verifies {
                    answer.is_problem(403, "forged-token");
                    assert_eq!(db.fence().inspect(&resource(name)).await.unwrap(), None);
                } else {
                    // One request is enough.
                    assert!(answer.status < 500, "{path}: {answer:?}");
                    break;
                }
            }
            // The holder of the lease can still write if tokens are verified, and cannot otherwise.
            let write = server.write(&format!("/write/{name}"), &granted).await;
            if verifies {
                assert_eq!(write.status, 200, "{path}: {write:?}");
            } else {
                let problem = write.is_problem(412, "stale-token");
                assert!(problem["max_token"].as_i64().unwrap() >= LAST - 1, "{path}");
            }
        }
    }
}

/// Counts the calls that determine the resource.
fn counting(
    asked: &Arc<AtomicUsize>,
) -> impl Fn(&Parts) -> Result<Resource, InvalidResource> + Clone + use<> {
    let asked = Arc::clone(asked);
    move |_| {
        asked.fetch_add(1, Ordering::SeqCst);
        Resource::new("a")
    }
}

async fn verification_precedes_all_other_checks<DB: TestDatabase>() {
    let db = DB::fresh(1).await;
    let (issuer, asked) = (keys("k1"), Arc::new(AtomicUsize::new(0)));
    let layer = FenceLayer::new(db.fence(), counting(&asked))
        .verify_with(issuer.clone())
        .idempotent(Idempotency::optional());
    let app: Router = Router::new()
        .route("/", any(|| async {}))
        .route_layer(layer);
    let send = async |method: &str, field: &str, body: Body| {
        let request = Request::builder().method(method);
        let request = request.header("Fencing-Token", field);
        let request = request
            .header("Idempotency-Key", "\"k\"")
            .body(body)
            .unwrap();
        let sent = timeout(Duration::from_secs(5), app.clone().oneshot(request));
        sent.await.expect("the request waits").unwrap()
    };
    let genuine = signed(&issuer, "a", 5);
    assert_eq!(send("POST", &genuine, Body::empty()).await.status(), 200);
    // From here on, the database is unreachable, and the body never ends.
    db.pool.close().await;
    let before = asked.load(Ordering::SeqCst);
    for (field, why) in [
        (genuine.replace("5;", "6;"), "WrongMac"),
        (genuine.replace("k1", "k2"), "UnknownKey"),
        (genuine.replace(";key=\"k1\"", ""), "Incomplete"),
        // The cache holds these tokens as used.
        ("5;resource=\"a\"".into(), "Unsigned"),
        ("5".into(), "Unsigned"),
        // One of several tokens is not signed.
        (format!("{genuine}, 7;resource=\"b\""), "Unsigned"),
    ] {
        for method in ["POST", "GET"] {
            let endless = stream::once(pending::<Result<Vec<u8>, std::io::Error>>());
            let response = send(method, &field, Body::from_stream(endless)).await;
            assert_eq!(response.status(), 403, "{method} {field}");
            let reason = match response.extensions().get::<Refusal>() {
                Some(Refusal::Forged(reason)) => format!("{reason:?}"),
                other => panic!("{other:?}"),
            };
            assert!(reason.starts_with(why), "{field}: {reason}");
        }
    }
    assert_eq!(asked.load(Ordering::SeqCst), before);
    // A genuine token reaches all of these components.
    let next = signed(&issuer, "a", 6);
    assert_eq!(send("POST", &next, Body::empty()).await.status(), 503);
    assert_eq!(asked.load(Ordering::SeqCst), before + 1);
}

async fn repetition_with_a_removed_key_needs_a_new_lease<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let issuer = keys("k1");
    let server = start(&db, Some(&issuer)).await;
    let send = async |field: &str| {
        let request = server.post("/keys/a").header("Fencing-Token", field);
        Answer::to(request.header("Idempotency-Key", "\"k\"")).await
    };
    let first = signed(&issuer, "a", 5);
    assert_eq!(send(&first).await.status, 200);
    assert_eq!(send(&first).await.headers["idempotent-replayed"], "true");
    issuer.replace(&keys("k2"));
    send(&first).await.is_problem(403, "forged-token");
    let again = send(&signed(&issuer, "a", 6)).await;
    assert_eq!(
        (again.status, &again.headers["idempotent-replayed"]),
        (200, &"true".parse().unwrap())
    );
    // The token of the new lease is not used up.
    let write = server.write("/write/a", signed(&issuer, "a", 6)).await;
    assert_eq!(write.status, 200);
}

async fn unsigned_tokens_are_accepted_until_they_are_disabled<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let issuer = keys("k1");
    let start = async |verification: Verification| {
        let layer = FenceLayer::new(db.fence(), PathParam("a")).verify_with(verification);
        Server::at("/{a}", post(|| async {}).route_layer(layer)).await
    };
    let moving = start(Verification::optional(issuer.clone())).await;
    let strict = start(issuer.clone().into()).await;
    for (token, field) in [(1, "1".to_owned()), (2, "2;resource=\"a\"".into())] {
        strict.refuses("/a", &field, 403, "forged-token").await;
        assert_eq!(moving.write("/a", &field).await.status, 200, "{token}");
    }
    let genuine = signed(&issuer, "a", 3);
    for forged in [
        genuine.replace("3;", "4;"),
        genuine.replace("k1", "k2"),
        genuine.split(";mac").next().unwrap().into(),
        genuine.replace(";key=\"k1\"", ""),
    ] {
        for server in [&moving, &strict] {
            server.refuses("/a", &forged, 403, "forged-token").await;
        }
    }
    assert_eq!(moving.write("/a", &genuine).await.status, 200);
    let next = strict.write("/a", signed(&issuer, "a", 4)).await;
    assert_eq!(next.status, 200);
    strict.refuses("/a", &genuine, 412, "stale-token").await;
}
