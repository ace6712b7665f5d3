//! Secrets do not leak. The test collects all log lines at the finest level while keys are read,
//! tokens are signed, verified and refused, and leases are granted. Neither these lines, nor the
//! answers to other clients, nor the output of `Debug` contain a secret.

use axum::{Router, routing::post};
use serde_json::{Value, json};
use sqlx::Sqlite;
use tower_fence::{
    FenceLayer, Idempotency, PathParam, Resource, Token, TokenKey, TokenKeys,
    client::{Holder, HttpLeases},
    header::{self, FencingToken},
    issuer::Issuer,
    lease::{LeaseId, MemoryLeases, Signed},
    token_keys::KeyId,
};

use crate::support::{
    database::TestDatabase,
    eventually,
    http::{Answer, Server},
    log::Log,
    process::Inventory,
};

/// A secret that the test recognizes in any spelling.
const SECRET: [u8; 32] = *b"the-secret-that-nobody-ever-sees";

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns each spelling of these bytes.
fn spellings(bytes: &[u8]) -> Vec<String> {
    let hex = hexadecimal(bytes);
    let listed = format!("{bytes:?}");
    let listed = listed.trim_matches(['[', ']']).to_owned();
    let escaped = bytes.escape_ascii().to_string();
    vec![hex.to_uppercase(), hex, listed, escaped]
}

/// Returns the MACs of a field, as they are written in the field and as bytes.
fn macs(field: &str) -> Vec<String> {
    let parsed = header::parse([field]).unwrap();
    let bytes = parsed.iter().filter_map(|token| token.mac.as_deref());
    let written = field.split("mac=:").skip(1);
    let written = written.map(|rest| rest.split(':').next().unwrap().to_owned());
    bytes.flat_map(spellings).chain(written).collect()
}

#[track_caller]
fn nothing_of(secrets: &[String], text: &str) {
    for secret in secrets.iter().filter(|secret| secret.len() > 3) {
        assert!(!text.contains(secret), "{secret} is in {text}");
    }
}

#[tokio::test]
async fn logs_contain_no_secret() {
    // This thread runs this test and all of its tasks.
    let (log, _guard) = Log::of_this_thread("trace");
    let key = TokenKey::new(KeyId::new("k1").unwrap(), SECRET).unwrap();
    let keys = TokenKeys::new([key.clone()]).unwrap();
    let db = Sqlite::fresh(4).await;
    let leases = MemoryLeases::new(db.fence()).announced_to(db.fence());
    let layer = FenceLayer::new(db.fence(), PathParam("sku"))
        .verify_with(keys.clone())
        .idempotent(Idempotency::optional());
    let signed = Signed::new(leases.clone(), keys.clone());
    let shown = format!("{key:?} {keys:?} {layer:?} {signed:?}");
    let issuer = Issuer::new(leases).sign_with(keys.clone());
    let shown = format!("{shown} {issuer:?}");
    let app = Router::new()
        .route("/inventory/{sku}", post(|| async {}))
        .route_layer(layer)
        .nest("/locks", issuer.router());
    let server = Server::start(app).await;

    let mut secrets = spellings(&SECRET);
    let id = LeaseId::random();
    let ask = json!({"lease_id": id.expose()});
    let lease = Answer::to(server.post("/locks/a").json(&ask)).await.json();
    secrets.push(id.expose().into());
    let genuine = lease["fencing_token"].as_str().unwrap().to_owned();
    secrets.extend(macs(&genuine));
    let mut answers = vec![];
    for forged in [
        genuine.replace("k1", "k2"),
        genuine.replace("k1", "an-unknown-one"),
        genuine.replace("\"a\"", "\"b\""),
        genuine.replace(";key=\"k1\"", ""),
        genuine.replace(":", "\""),
        format!("{genuine}, {genuine}"),
        genuine.clone(),
        genuine.clone(),
    ] {
        answers.push(server.write("/inventory/a", forged).await.text);
    }
    // The answers include each refusal and a success.
    for found in ["forged-token", "malformed-token", "stale-token"] {
        assert_contains!(answers.join("\n"), found);
    }
    let id = LeaseId::random();
    let wrong = server.renew("/locks/a", id.expose(), json!({})).await;
    answers.push(wrong.text);
    answers.push(Answer::to(server.get("/locks/a")).await.text);

    let holder = Holder::new(HttpLeases::new(&server.url("/locks")).unwrap());
    let guard = holder.acquire("c").await.unwrap();
    let field = guard.fencing_token().to_string();
    secrets.extend(macs(&field));
    let shown = format!("{shown} {guard:?} {:?}", guard.fencing_token());
    guard.renew_with_new_token().await.unwrap();
    guard.release().await.unwrap();
    for (text, error) in [
        (format!("k1:{}", hexadecimal(&SECRET[..31])), "31"),
        (format!("k1:{}x", hexadecimal(&SECRET)), "hexadecimal"),
        (format!("k1 {}", hexadecimal(&SECRET)), "ID:SECRET"),
        (format!("k1:{0} k1:{0}", hexadecimal(&SECRET)), "k1"),
    ] {
        let refused = text.parse::<TokenKeys>().unwrap_err();
        assert_contains!(refused.to_string(), error);
        answers.push(format!("{refused} {refused:?}"));
    }

    // All tests of this process together log at most one line about forged tokens per second.
    for why in [
        "this token was not signed with the key k1",
        "the key k9 is unknown",
    ] {
        eventually("the reason is logged", async || {
            let forged = match why.contains("k9") {
                true => genuine.replace("k1", "k9"),
                false => genuine.replace("1000000001", "1000000002"),
            };
            server.write("/inventory/a", forged).await;
            log.text().contains(why)
        })
        .await;
    }
    let logged = log.text();
    assert_contains!(logged, "TRACE");
    nothing_of(&secrets, &shown);
    nothing_of(&secrets, &answers.join("\n"));
    // The HTTP messages of the client contain the secrets, but the log does not.
    nothing_of(&secrets, &logged);
}

#[tokio::test]
async fn logs_of_the_example_contain_no_secret() {
    let secret = hexadecimal(&SECRET);
    let key = format!("k1:{secret}");
    let variables = [("TOKEN_KEY", &*key), ("RUST_LOG", "trace")];
    let service = Inventory::start(&variables).await;
    let client = crate::support::http::client();
    let ask = async |resource: &str| -> Value {
        let ask = client.post(service.url(&format!("/locks/{resource}")));
        Answer::to(ask.json(&json!({}))).await.json()
    };
    let write = async |field: &str| {
        let put = client.put(service.url("/inventory/a"));
        let put = put.header("Fencing-Token", field);
        Answer::to(put.json(&json!({"stock": 3}))).await
    };
    let lease = ask("a").await;
    let field = lease["fencing_token"].as_str().unwrap();
    let unsigned = format!("{};resource=\"a\"", Token::MAX);
    for forged in [unsigned, field.replace("k1", "k2")] {
        write(&forged).await.is_problem(403, "forged-token");
    }
    assert_eq!(write(field).await.status, 200);
    let other = ask("b").await;
    let keys: TokenKeys = key.parse().unwrap();
    let signed: FencingToken = other["fencing_token"].as_str().unwrap().parse().unwrap();
    assert_eq!(keys.verify(&signed), Ok(&Resource::new("b").unwrap()));

    let mut secrets = spellings(&SECRET);
    for lease in [&lease, &other] {
        secrets.push(lease["lease_id"].as_str().unwrap().into());
        secrets.extend(macs(lease["fencing_token"].as_str().unwrap()));
    }
    let output = service.stdout() + &service.log();
    for text in ["TRACE", "forged-token", "signed and verified"] {
        assert_contains!(output, text);
    }
    nothing_of(&secrets, &output);
}
