//! Verifies the vectors of signed tokens, which the `hmac` module of Python has signed.

use std::collections::BTreeMap;

use axum::{Router, body::Body, http::Request, routing::post};
use serde::Deserialize;
use sqlx::Sqlite;
use tower::ServiceExt;
use tower_fence::{
    FenceLayer, PathParam, TokenKey, TokenKeys, header::FencingToken, token_keys::KeyId,
};

use super::{problem, resource, token, vectors};
use crate::support::database::TestDatabase;

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

    /// Returns all keys. The key with the id `signs` signs tokens.
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
        let carried = signed.mac.unwrap();
        assert_eq!(carried, bytes(&one.mac), "{}", one.field);
        let message = bytes(&one.message);
        assert!(message.starts_with(b"tower-fence token v1"));
        assert!(message.ends_with(&one.token.to_be_bytes()));

        // Verification does not depend on which key signs.
        let other = vectors.keys("k1").audience(one.audience.as_str());
        let read: FencingToken = one.field.parse().unwrap();
        assert_eq!(other.verify(&read), Ok(&resource(&one.resource)));
        other.audience("elsewhere").verify(&read).unwrap_err();
    }
}

#[tokio::test]
async fn forged_tokens_are_refused_with_one_answer() {
    let vectors = Vectors::read();
    let keys = vectors.keys("k1");
    let db = Sqlite::fresh(1).await;
    let app: Router = Router::new()
        .route("/{sku}", post(async || {}))
        .route_layer(FenceLayer::new(db.fence(), PathParam("sku")).verify_with(keys.clone()));
    let send = async |field: &str| {
        let request = Request::post("/sku-1").header("Fencing-Token", field);
        let request = request.body(Body::empty()).unwrap();
        app.clone().oneshot(request).await.unwrap()
    };
    let mut answers = vec![];
    for Refused { comment, field } in &vectors.refused {
        // The field itself is well-formed.
        let token = field.parse::<FencingToken>().unwrap();
        assert!(keys.verify(&token).is_err(), "{comment}");
        let response = send(field).await;
        assert_eq!(response.status(), 403, "{comment}");
        answers.push(problem(response, "forged-token", comment).await);
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert_eq!(db.fence().inspect(&resource("sku-1")).await.unwrap(), None);
    assert_eq!(send(&vectors.signed[0].field).await.status(), 200);
}
