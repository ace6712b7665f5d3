//! The contract, `tests/vectors` and `src/spec.md`, against this implementation; and what the
//! documentation has in SQL.

use std::{
    collections::BTreeMap,
    fs,
    path::Path as FilePath,
    sync::{Arc, Mutex},
};

use axum::{
    Json, Router,
    body::{Body, to_bytes},
    extract::Path,
    http::{Request, StatusCode, request::Parts},
    response::Response,
    routing::any,
};
use reqwest::Url;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use sqlx::{Postgres, Sqlite, postgres::PgPoolOptions};
use tower::ServiceExt;
use tower_fence::{
    AdmitError, AllAdmitted, Fence, FenceLayer, FencedTx, Idempotency, InvalidResource, Resource,
    Token, TokenUse,
    announce::{Announce, AnnounceError, LeaseDigest},
    epochs::{Epoch, EpochFuture, Epochs, SourceId},
    header::{self, FencingToken},
    issuer,
    layer::{NoTransaction, Rejection},
    lease::EmbeddedLeases,
};

use crate::support::database::{TestDatabase, on_both_databases};

on_both_databases!(
    tokens_are_admitted_in_sequence,
    the_plain_statement_admits_the_same,
    answers_move_the_fence,
);

fn vectors<T: DeserializeOwned>(file: &str) -> T {
    serde_json::from_str(&text(&format!("tests/vectors/{file}"))).unwrap()
}

/// The text of a file of the repository.
fn text(path: &str) -> String {
    fs::read_to_string(FilePath::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

fn resource(name: &str) -> Resource {
    Resource::new(name).unwrap()
}

fn token(value: i64) -> Token {
    Token::new(value).unwrap()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderVectors {
    #[serde(rename = "description")]
    _description: String,
    valid: Vec<ValidHeader>,
    invalid: Vec<InvalidHeader>,
    requests: Vec<RequestHeader>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ValidHeader {
    lines: Vec<String>,
    tokens: Vec<Member>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Member {
    token: i64,
    resource: Option<String>,
    mac: Option<String>,
}

impl From<&FencingToken> for Member {
    fn from(token: &FencingToken) -> Self {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Self {
            token: token.token.get(),
            resource: token.resource.as_ref().map(Resource::to_string),
            mac: token.mac.as_deref().map(hex),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InvalidHeader {
    lines: Vec<String>,
    problem: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestHeader {
    #[serde(rename = "comment")]
    _comment: Option<String>,
    resources: Vec<String>,
    lines: Vec<String>,
    tokens: Option<BTreeMap<String, i64>>,
    problem: Option<String>,
    #[serde(default)]
    members: Map<String, Value>,
}

#[test]
fn the_field_is_parsed() {
    let HeaderVectors { valid, invalid, .. } = vectors("header.json");
    for ValidHeader { lines, tokens } in &valid {
        let parsed = header::parse(lines).unwrap_or_else(|error| panic!("{lines:?}: {error}"));
        let members: Vec<_> = parsed.iter().map(Member::from).collect();
        assert_eq!(members, *tokens, "{lines:?}");
        let again = header::parse([header::format(&parsed)]).unwrap();
        assert_eq!(again, parsed, "{lines:?}");
    }
    for InvalidHeader { lines, problem } in &invalid {
        let Err(error) = header::parse(lines) else {
            panic!("{lines:?} was taken");
        };
        let kind = Rejection::from(error).problem_type();
        assert_eq!(kind.name(), problem, "{lines:?}");
    }
}

#[tokio::test]
async fn each_resource_of_a_request_finds_its_token() {
    for vector in vectors::<HeaderVectors>("header.json").requests {
        let db = Sqlite::fresh(1).await;
        let named: Vec<_> = vector.resources.iter().map(|name| resource(name)).collect();
        let names = move |_: &Parts| Ok::<_, InvalidResource>(named.clone());
        let admitted = |all: AllAdmitted| async move {
            let tokens = all
                .iter()
                .map(|one| (one.resource.to_string(), one.token.get()));
            Json(tokens.collect::<BTreeMap<_, _>>())
        };
        let app: Router = Router::new()
            .route("/", any(admitted))
            .route_layer(FenceLayer::new(db.fence(), names));
        let mut request = Request::post("/");
        for line in &vector.lines {
            request = request.header("Fencing-Token", line);
        }
        let request = request.body(Body::empty()).unwrap();
        let response = app.oneshot(request).await.unwrap();
        let context = format!("{:?} for {:?}", vector.lines, vector.resources);
        match (vector.tokens, vector.problem) {
            (Some(tokens), None) => {
                assert_eq!(response.status(), 200, "{context}");
                assert_eq!(json(response).await, serde_json::json!(tokens), "{context}");
            }
            (None, Some(name)) => {
                let problem = problem(response, &name, &context).await;
                for (member, value) in vector.members {
                    assert_eq!(problem[&member], value, "{context}");
                }
            }
            _ => panic!("either tokens or a problem: {context}"),
        }
    }
}

async fn json(response: Response) -> Value {
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    serde_json::from_slice(&body).unwrap()
}

async fn problem(response: Response, name: &str, context: &str) -> Value {
    let problem = json(response).await;
    let kind = problem["type"].as_str().unwrap_or_default();
    assert!(kind.ends_with(&format!("#{name}")), "{context}: {problem}");
    problem
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResourceVectors {
    #[serde(rename = "description")]
    _description: String,
    valid: Vec<Name>,
    invalid: Vec<Name>,
    different: Vec<[String; 2]>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Name {
    name: String,
    #[serde(default = "once")]
    repeat: usize,
}

fn once() -> usize {
    1
}

#[test]
fn resources_have_valid_names() {
    let vectors: ResourceVectors = vectors("resources.json");
    for Name { name, repeat } in vectors.valid {
        let name = name.repeat(repeat);
        assert_eq!(Resource::new(&name).unwrap().as_str(), name);
    }
    for Name { name, repeat } in vectors.invalid {
        Resource::new(name.repeat(repeat)).expect_err(&name);
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

#[tokio::test]
async fn an_issuer_asks_for_an_epoch_of_the_partition_and_writes_the_token() {
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

/// The first grant of a resource, and the partitions whose epoch it took.
async fn acquire(resource: &str, epoch: i64) -> (Vec<u8>, Response) {
    let source = EpochSource {
        epoch: Epoch::new(epoch).unwrap(),
        asked: Arc::default(),
    };
    let asked = Arc::clone(&source.asked);
    let app: Router = issuer::router(EmbeddedLeases::new(source));
    let mut url = Url::parse("http://issuer").unwrap();
    url.path_segments_mut().unwrap().push(resource);
    let request = Request::post(url.path()).body(Body::empty()).unwrap();
    let response = app.oneshot(request).await.unwrap();
    let asked = asked.lock().unwrap().clone();
    (asked, response)
}

/// A source that gives one epoch, and notes for which partitions.
struct EpochSource {
    epoch: Epoch,
    asked: Arc<Mutex<Vec<u8>>>,
}

impl Epochs for EpochSource {
    fn next_epoch(&self, partition: u8, _: Epoch) -> EpochFuture<'_> {
        self.asked.lock().unwrap().push(partition);
        Box::pin(async { Ok(self.epoch) })
    }

    fn bring_back(&self, _: u8, _: Epoch) -> EpochFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        Box::pin(async { Ok(SourceId::new("vectors").unwrap()) })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdmissionVectors {
    #[serde(rename = "description")]
    _description: String,
    sequences: Vec<Sequence>,
    answers: Vec<AnswerOf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sequence {
    name: String,
    initial: Option<i64>,
    steps: Vec<Step>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
enum Step {
    Write {
        token: i64,
        #[serde(rename = "use")]
        token_use: Use,
        #[serde(default)]
        ends: Ends,
        outcome: Outcome,
        max_token: Option<i64>,
    },
    Raise {
        token: i64,
        outcome: Outcome,
        max_token: Option<i64>,
    },
    Announce {
        token: i64,
        lease: String,
        outcome: Outcome,
        next: Option<i64>,
        #[serde(default)]
        was_last: bool,
        max_token: Option<i64>,
    },
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Use {
    SingleUse,
    Reusable,
}

impl From<Use> for TokenUse {
    fn from(token_use: Use) -> Self {
        match token_use {
            Use::SingleUse => Self::SingleUse,
            Use::Reusable => Self::Reusable,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Ends {
    #[default]
    Commit,
    Rollback,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Outcome {
    Admitted,
    Raised,
    Stale,
    Announced,
    Outranked,
    Exhausted,
}

async fn tokens_are_admitted_in_sequence<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let vectors: AdmissionVectors = vectors("admission.json");
    for sequence in vectors.sequences {
        let name = resource(&sequence.name);
        begin_at(&fence, &name, sequence.initial).await;
        for step in sequence.steps {
            let (outcome, expected, max_token) = run(&fence, &name, &step).await;
            assert_eq!(outcome, expected, "{name}: {step:?}");
            let found = fence.inspect(&name).await.unwrap();
            assert_eq!(found, max_token, "{name}: {step:?}");
        }
    }
}

/// What a program in another language runs, as it stands in the text of the contract.
async fn the_plain_statement_admits_the_same<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let contract = text("src/spec.md");
    let blocks = sql_blocks(&contract);
    let [admit, raise] = blocks[..] else {
        panic!("the contract has two statements: {blocks:?}");
    };
    let vectors: AdmissionVectors = vectors("admission.json");
    let mut run_plain = 0;
    for sequence in vectors.sequences {
        let name = resource(&sequence.name);
        begin_at(&fence, &name, sequence.initial).await;
        let mut before = sequence.initial;
        for step in sequence.steps {
            let (text, token, floor, expected, max_token) = match step {
                Step::Write {
                    token,
                    token_use: Use::SingleUse,
                    ends: Ends::Commit,
                    outcome,
                    max_token,
                } => (admit, token, token, outcome == Outcome::Admitted, max_token),
                Step::Write {
                    token,
                    token_use: Use::Reusable,
                    ends: Ends::Commit,
                    outcome,
                    max_token,
                } => (
                    admit,
                    token,
                    token - 1,
                    outcome == Outcome::Admitted,
                    max_token,
                ),
                Step::Raise {
                    token, max_token, ..
                } => {
                    let moves = max_token == Some(token - 1) && before != max_token;
                    (raise, token - 1, token - 1, moves, max_token)
                }
                Step::Write { max_token, .. } | Step::Announce { max_token, .. } => {
                    run(&fence, &name, &step).await;
                    before = max_token;
                    continue;
                }
            };
            run_plain += 1;
            let sql = text
                .replace("$1", &format!("'{name}'"))
                .replace("$2", &token.to_string())
                .replace("$3", &floor.to_string());
            let mut conn = db.pool.acquire().await.unwrap();
            let left = DB::number(&mut conn, &format!("{sql} RETURNING max_token")).await;
            drop(conn);
            match left {
                Ok(left) => {
                    assert_eq!((expected, Some(left)), (true, max_token), "{name}: {token}")
                }
                Err(sqlx::Error::RowNotFound) => assert!(!expected, "{name}: {token}"),
                Err(error) => panic!("{name}: {error}"),
            }
            let found = fence.inspect(&name).await.unwrap();
            assert_eq!(found, max_token, "{name}: {token}");
            before = max_token;
        }
    }
    assert!(run_plain > 30, "{run_plain}");
}

/// The blocks of SQL in a text.
fn sql_blocks(text: &str) -> Vec<&str> {
    let blocks = text.split("```");
    blocks
        .filter_map(|block| block.strip_prefix("sql\n"))
        .collect()
}

#[tokio::test]
async fn the_rights_that_the_documentation_names_suffice() {
    let db = Postgres::fresh(1).await;
    let role = format!("app_{:016x}", rand::random::<u64>());
    let documentation = text("src/deployment.md");
    let blocks = sql_blocks(&documentation);
    let [grants] = blocks[..] else {
        panic!("the documentation has one list of rights: {blocks:?}");
    };
    db.execute(&format!("CREATE ROLE {role} LOGIN PASSWORD 'of-a-test'"))
        .await;
    let mut url = Url::parse(&db.url).unwrap();
    url.set_username(&role).unwrap();
    url.set_password(Some("of-a-test")).unwrap();
    let options = PgPoolOptions::new().max_connections(2);
    let pool = options.connect(url.as_str()).await.unwrap();
    let fence = Fence::new(pool.clone());
    let name = resource("sku-1");
    let refused = fence.begin(&name, token(1), TokenUse::SingleUse).await;
    refused.expect_err("nothing was granted yet");

    db.execute(&grants.replace("shop_app", &role)).await;
    db.execute(&format!("GRANT SELECT, INSERT ON ledger TO {role}"))
        .await;
    // Roles that own nothing make no tables.
    fence
        .migrate()
        .await
        .expect_err("the role may not create tables");
    let leases = EmbeddedLeases::new(fence.clone());
    let keys = Idempotency::required();
    let layer = FenceLayer::new(fence.clone(), |_: &Parts| Resource::new("sku-1"));
    let layer = layer.idempotent(keys).issued_by_this_database();
    let app: Router = Router::new()
        .route("/{status}/{entry}", any(answer::<Postgres>))
        .route_layer(layer)
        .nest("/locks", issuer::router(leases));
    let acquire = Request::post("/locks/sku-1").body(Body::empty()).unwrap();
    let granted = app.clone().oneshot(acquire).await.unwrap();
    assert_eq!(granted.status(), 201);
    let first = token(1_000_000_001);
    let lease = LeaseDigest::of("its lease");
    let announced = fence.announce(&name, first, &lease).await;
    announced.unwrap_or_else(|error| panic!("{error:?}"));
    for (status, entry) in [(409, 1), (200, 2), (200, 2)] {
        let request = Request::post(format!("/{status}/{entry}"))
            .header("Fencing-Token", &granted.headers()["fencing-token"])
            .header("Idempotency-Key", format!("\"{status}\""))
            .body(Body::empty());
        let response = app.clone().oneshot(request.unwrap()).await.unwrap();
        assert_eq!(response.status(), status);
    }
    assert_eq!(db.entries().await, 1);
    let written: Vec<(i64,)> = fence
        .write(
            &name,
            token(2_000_000_000),
            TokenUse::Reusable,
            sqlx::query("INSERT INTO ledger SELECT 3 FROM fence RETURNING entry"),
        )
        .await
        .unwrap_or_else(|error| panic!("{error:?}"));
    assert_eq!(written, [(3,)]);
    fence.remove_expired_keys().await.unwrap();
    fence.reset(&name, token(2_000_000_000)).await.unwrap();
    pool.close().await;
    db.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await;
}

/// Brings a resource that was never seen to this `max_token`.
async fn begin_at<DB: TestDatabase>(fence: &Fence<DB>, name: &Resource, max_token: Option<i64>) {
    if let Some(max_token) = max_token {
        fence.raise(name, token(max_token + 1)).await.unwrap();
    }
    assert_eq!(fence.inspect(name).await.unwrap(), max_token);
}

/// What came of a step, what should have come, and the `max_token` that it should have left.
async fn run<DB: TestDatabase>(
    fence: &Fence<DB>,
    name: &Resource,
    step: &Step,
) -> (Outcome, Outcome, Option<i64>) {
    match *step {
        Step::Write {
            token: value,
            token_use,
            ends,
            outcome,
            max_token,
        } => {
            let begun = fence.begin(name, token(value), token_use.into()).await;
            let found = match begun {
                Ok(tx) if ends == Ends::Commit => {
                    tx.commit().await.unwrap();
                    Outcome::Admitted
                }
                Ok(_) => Outcome::Admitted,
                Err(error) => stale(error, max_token),
            };
            (found, outcome, max_token)
        }
        Step::Raise {
            token: value,
            outcome,
            max_token,
        } => {
            let raised = fence.raise(name, token(value)).await;
            let found = raised.map_or_else(|error| stale(error, max_token), |()| Outcome::Raised);
            (found, outcome, max_token)
        }
        Step::Announce {
            token: value,
            ref lease,
            outcome,
            next: expected,
            was_last: expected_last,
            max_token,
        } => {
            let digest = LeaseDigest::of(lease);
            let found = match fence.announce(name, token(value), &digest).await {
                Ok(()) => Outcome::Announced,
                Err(AnnounceError::Outranked { next, was_last, .. }) => {
                    assert_eq!(Some(next.get()), expected, "{name}: {step:?}");
                    assert_eq!(was_last, expected_last, "{name}: {step:?}");
                    Outcome::Outranked
                }
                Err(AnnounceError::Exhausted { .. }) => Outcome::Exhausted,
                Err(error) => panic!("{name}: {step:?}: {error:?}"),
            };
            (found, outcome, max_token)
        }
    }
}

fn stale(error: AdmitError, max_token: Option<i64>) -> Outcome {
    match error {
        AdmitError::Stale(stale) => {
            assert_eq!(Some(stale.max_token), max_token);
            Outcome::Stale
        }
        other => panic!("{other:?}"),
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AnswerOf {
    method: String,
    token: Option<i64>,
    #[serde(rename = "use")]
    token_use: Use,
    initial: Option<i64>,
    status: u16,
    #[serde(default)]
    used: bool,
    problem: Option<String>,
    max_token: Option<i64>,
    #[serde(default)]
    committed: bool,
}

async fn answers_move_the_fence<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let name = |parts: &Parts| Resource::new(parts.headers["name"].to_str().unwrap());
    let app = |layer| -> Router {
        Router::new()
            .route("/{status}/{entry}", any(answer::<DB>))
            .route_layer(layer)
    };
    let once = app(FenceLayer::new(fence.clone(), name));
    let reusable = app(FenceLayer::new(fence.clone(), name).reusable());
    let vectors: AdmissionVectors = vectors("admission.json");
    for (entry, vector) in (1..).zip(vectors.answers) {
        let name = resource(&format!("answer-{entry}"));
        begin_at(&fence, &name, vector.initial).await;
        let app = match vector.token_use {
            Use::SingleUse => once.clone(),
            Use::Reusable => reusable.clone(),
        };
        let entry = if vector.used { entry } else { 0 };
        let mut request = Request::builder()
            .method(vector.method.as_str())
            .uri(format!("/{}/{entry}", vector.status))
            .header("name", name.as_str());
        if let Some(token) = vector.token {
            request = request.header("Fencing-Token", token);
        }
        let response = app.oneshot(request.body(Body::empty()).unwrap()).await;
        let response = response.unwrap();
        let context = format!("{vector:?}");
        match &vector.problem {
            None => assert_eq!(response.status(), vector.status, "{context}"),
            Some(name) => drop(problem(response, name, &context).await),
        }
        let found = fence.inspect(&name).await.unwrap();
        assert_eq!(found, vector.max_token, "{context}");
        let entries = format!("SELECT count(*) FROM ledger WHERE entry = {entry}");
        let committed = db.number(&entries).await == 1;
        assert_eq!(committed, vector.committed, "{context}");
    }
}

/// Writes an entry, where it is told to, and answers as it is told.
async fn answer<DB: TestDatabase>(
    tx: Result<FencedTx<DB>, NoTransaction>,
    Path((status, entry)): Path<(u16, i64)>,
) -> StatusCode {
    if entry > 0 {
        let insert = format!("INSERT INTO ledger VALUES ({entry})");
        DB::execute(&mut tx.unwrap(), &insert).await.unwrap();
    }
    StatusCode::from_u16(status).unwrap()
}
