//! The vectors of names, tokens, epochs and partitions.

use std::sync::{Arc, Mutex};

use axum::{Router, body::Body, http::Request, response::Response};
use reqwest::Url;
use serde::Deserialize;
use tower::ServiceExt;
use tower_fence::{
    Resource, Token,
    epochs::{Epoch, EpochFuture, Epochs, SourceId},
    issuer,
    lease::MemoryLeases,
};

use super::{json, resource, token, vectors};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ResourceVectors {
    #[serde(rename = "description")]
    _description: String,
    pub(super) valid: Vec<Name>,
    pub(super) invalid: Vec<Name>,
    different: Vec<[String; 2]>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Name {
    name: String,
    #[serde(default = "once")]
    repeat: usize,
}

fn once() -> usize {
    1
}

impl Name {
    pub(super) fn text(&self) -> String {
        self.name.repeat(self.repeat)
    }
}

#[test]
fn resources_have_valid_names() {
    let vectors: ResourceVectors = vectors("resources.json");
    for name in vectors.valid.iter().map(Name::text) {
        assert_eq!(Resource::new(&name).unwrap().as_str(), name);
    }
    for name in vectors.invalid.iter().map(Name::text) {
        Resource::new(name.as_str()).expect_err(&name);
    }
    for [one, other] in vectors.different {
        assert_ne!(resource(&one), resource(&other));
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenVectors {
    #[serde(rename = "description")]
    _description: String,
    partitions: Vec<PartitionOf>,
    tokens: Vec<TokenOf>,
    epochs: Vec<EpochOf>,
    zxids: Vec<Zxid>,
    issued: Vec<Issued>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PartitionOf {
    resource: String,
    partition: u8,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenOf {
    epoch: i64,
    n: i64,
    token: Option<i64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EpochOf {
    token: i64,
    epoch: Option<i64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Zxid {
    zxid: i64,
    token: Option<i64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Issued {
    epoch: i64,
    resource: String,
    partition: u8,
    token: i64,
    fencing_token: String,
}

#[test]
fn a_token_is_an_epoch_and_a_number() {
    let vectors: TokenVectors = vectors("tokens.json");
    for TokenOf {
        epoch,
        n,
        token: expected,
    } in vectors.tokens
    {
        let made = Epoch::new(epoch).ok().and_then(|epoch| epoch.token(n));
        assert_eq!(made.map(Token::get), expected, "{epoch} and {n}");
    }
    for EpochOf {
        token: value,
        epoch,
    } in vectors.epochs
    {
        assert_eq!(Epoch::of(token(value)).map(Epoch::get), epoch, "{value}");
    }
}

#[test]
fn zxid_in_range_is_a_token() {
    let vectors: TokenVectors = vectors("tokens.json");
    for Zxid { zxid, token } in vectors.zxids {
        assert_eq!(Token::new(zxid).ok().map(Token::get), token, "{zxid}");
    }
}

#[tokio::test]
async fn issuer_takes_an_epoch_and_builds_the_token() {
    let vectors: TokenVectors = vectors("tokens.json");
    for PartitionOf {
        resource,
        partition,
    } in vectors.partitions
    {
        let (asked, _) = acquire(&resource, 1).await;
        assert_eq!(asked, [partition], "{resource}");
    }
    for issued in vectors.issued {
        let (asked, response) = acquire(&issued.resource, issued.epoch).await;
        assert_eq!(asked, [issued.partition], "{}", issued.resource);
        assert_eq!(response.status(), 201);
        let field = response.headers()["fencing-token"].to_str().unwrap();
        assert_eq!(field, issued.fencing_token);
        let body = json(response).await;
        assert_eq!(body["resource"], issued.resource);
        assert_eq!(body["token"], issued.token);
        assert_eq!(body["fencing_token"], issued.fencing_token);
    }
}

/// Acquires a resource for the first time. Returns the partitions whose epoch was requested, and
/// the response.
async fn acquire(resource: &str, epoch: i64) -> (Vec<u8>, Response) {
    let source = EpochSource {
        epoch: Epoch::new(epoch).unwrap(),
        asked: Arc::default(),
    };
    let asked = Arc::clone(&source.asked);
    let app: Router = issuer::router(MemoryLeases::new(source));
    let mut url = Url::parse("http://issuer").unwrap();
    url.path_segments_mut().unwrap().push(resource);
    let request = Request::post(url.path()).body(Body::empty()).unwrap();
    let response = app.oneshot(request).await.unwrap();
    let asked = asked.lock().unwrap().clone();
    (asked, response)
}

/// A source that assigns one epoch, and records the partitions.
struct EpochSource {
    epoch: Epoch,
    asked: Arc<Mutex<Vec<u8>>>,
}

impl Epochs for EpochSource {
    fn next_epoch(&self, partition: u8, _: Epoch) -> EpochFuture<'_> {
        self.asked.lock().unwrap().push(partition);
        Box::pin(async { Ok(self.epoch) })
    }

    fn report_epoch(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
        Box::pin(async move { Ok(seen) })
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        Box::pin(async { Ok(SourceId::new("vectors").unwrap()) })
    }
}
