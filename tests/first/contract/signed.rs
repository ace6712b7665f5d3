//! The vectors of signed tokens: over this crate, over the functions in Postgres, and over Python's hmac, which has made them.

use std::collections::BTreeMap;

use axum::{Router, body::Body, http::Request, routing::post};
use serde::Deserialize;
use sqlx::{Postgres, Sqlite};
use tower::ServiceExt;
use tower_fence::{
    FenceLayer, PathParam, SignedToken, TokenKey, TokenKeys,
    header::{self, FencingToken},
    token_keys::KeyId,
};

use super::{problem, resource, token, vectors};
use crate::support::{
    database::TestDatabase,
    functions::{add_token_key, admit_signed, is_refused, raise_signed},
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Vectors {
    #[serde(rename = "description")]
    _description: String,
    keys: BTreeMap<String, String>,
    signed: Vec<Signed>,
    refused: Vec<Refused>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Signed {
    key: String,
    audience: String,
    resource: String,
    token: i64,
    message: String,
    mac: String,
    field: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Refused {
    comment: String,
    field: String,
}

fn bytes(digits: &str) -> Vec<u8> {
    let pairs = (0..digits.len()).step_by(2);
    pairs
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect()
}

impl Vectors {
    fn read() -> Self {
        vectors("signed_tokens.json")
    }

    /// All keys, of which this one signs.
    fn keys(&self, signs: &str) -> TokenKeys {
        let key = |id: &str| {
            let secret = bytes(&self.keys[id]);
            TokenKey::new(KeyId::new(id).unwrap(), secret).unwrap()
        };
        let others = self.keys.keys().filter(|id| *id != signs);
        let ids = [signs].into_iter().chain(others.map(String::as_str));
        TokenKeys::new(ids.map(key)).unwrap()
    }
}

#[test]
fn tokens_are_signed_and_verified_as_the_specification_says() {
    let vectors = Vectors::read();
    for one in &vectors.signed {
        let keys = vectors.keys(&one.key).audience(one.audience.as_str());
        let signed = keys.sign(&resource(&one.resource), token(one.token));
        assert_eq!(signed.to_string(), one.field);
        let carried = FencingToken::from(signed).mac.unwrap();
        assert_eq!(carried, bytes(&one.mac), "{}", one.field);
        let message = bytes(&one.message);
        assert!(message.starts_with(b"tower-fence token v1"));
        assert!(message.ends_with(&one.token.to_be_bytes()));

        // Whichever key signs.
        let other = vectors.keys("k1").audience(one.audience.as_str());
        let read: SignedToken = one.field.parse().unwrap();
        read.verify(&other).unwrap();
        read.verify(&other.audience("elsewhere")).unwrap_err();
    }
}

#[tokio::test]
async fn what_is_not_the_issuers_is_refused_with_one_answer() {
    let vectors = Vectors::read();
    let keys = vectors.keys("k1");
    let db = Sqlite::fresh(1).await;
    let app: Router = Router::new()
        .route("/{sku}", post(async || {}))
        .route_layer(FenceLayer::new(db.fence(), PathParam("sku")).verify_with(keys.clone()));
    let send = async |field: &str| {
        let request = Request::post("/sku-1").header("Fencing-Token", field);
        app.clone()
            .oneshot(request.body(Body::empty()).unwrap())
            .await
            .unwrap()
    };
    let mut answers = vec![];
    for Refused { comment, field } in &vectors.refused {
        // The field itself is well-formed.
        assert_eq!(header::parse([field]).unwrap().len(), 1, "{comment}");
        let verified = field.parse::<SignedToken>().ok();
        let verified = verified.and_then(|signed| signed.verify(&keys).ok());
        assert!(verified.is_none(), "{comment}");
        let response = send(field).await;
        assert_eq!(response.status(), 403, "{comment}");
        answers.push(problem(response, "forged-token", comment).await);
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert_eq!(db.fence().inspect(&resource("sku-1")).await.unwrap(), None);
    assert_eq!(send(&vectors.signed[0].field).await.status(), 200);
}

#[tokio::test]
async fn the_functions_take_and_refuse_the_same() {
    let vectors = Vectors::read();
    for one in &vectors.signed {
        let db = Postgres::fresh(2).await;
        let mut conn = db.pool.acquire().await.unwrap();
        for (id, secret) in &vectors.keys {
            add_token_key(&mut conn, id, &bytes(secret), &one.audience)
                .await
                .unwrap();
        }
        let raised = raise_signed(&mut conn, &one.field).await.unwrap();
        assert_eq!(raised, one.token - 1, "{}", one.field);
        let admitted = admit_signed(&mut conn, &one.field).await.unwrap();
        assert_eq!(admitted, one.token, "{}", one.field);
        let found = db.fence().inspect(&resource(&one.resource)).await.unwrap();
        assert_eq!(found, Some(one.token));
        is_refused(admit_signed(&mut conn, &one.field).await, "TF412");
    }
    let db = Postgres::fresh(1).await;
    let mut conn = db.pool.acquire().await.unwrap();
    for (id, secret) in &vectors.keys {
        add_token_key(&mut conn, id, &bytes(secret), "")
            .await
            .unwrap();
    }
    let mut answers = vec![];
    for Refused { comment, field } in &vectors.refused {
        let refused = is_refused(admit_signed(&mut conn, field).await, "TF403");
        assert_eq!(refused.problem["status"], 403, "{comment}");
        answers.push(refused.problem);
        is_refused(raise_signed(&mut conn, field).await, "TF403");
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "{answers:?}");
    drop(conn);
    let rows = "SELECT count(*) FROM fence_resources";
    assert_eq!(db.number(rows).await, 0);
}

#[tokio::test]
async fn no_error_about_a_key_shows_it() {
    let db = Postgres::fresh(1).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let secret = [0xab; 32];
    add_token_key(&mut conn, "k1", &secret, "").await.unwrap();
    // As it is, and as it is stored.
    let shown = [0xab_u8, 0xab ^ 0x36, 0xab ^ 0x5c].map(|octet| format!("{octet:02x}").repeat(4));
    for (id, audience) in [
        (Some("k1"), Some("")),
        (Some("no id"), Some("")),
        (None, Some("")),
        (Some("k2"), None),
    ] {
        let add = sqlx::query("SELECT fence_add_token_key($1, $2, $3)")
            .bind(id)
            .bind(&secret[..])
            .bind(audience);
        let error = add.execute(&mut *conn).await.unwrap_err();
        let told = format!("{error:?}");
        for digits in &shown {
            assert!(
                !told.contains(digits.as_str()),
                "{id:?}, {audience:?}: {told}"
            );
        }
    }
    for short in [&[][..], &secret[1..]] {
        let refused = add_token_key(&mut conn, "k3", short, "").await;
        assert_eq!(refused.unwrap_err().code, "22023");
    }
}
