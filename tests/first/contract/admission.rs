//! The vectors of admission, run by the fence and by the plain statements of the contract, and the
//! vectors of answers.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{Request, StatusCode, request::Parts},
    routing::any,
};
use serde::Deserialize;
use sqlx::Sqlite;
use tower::ServiceExt;
use tower_fence::{
    AdmitError, Fence, FenceLayer, FencedTx, Resource, Token, TokenUse,
    announce::{Announce, AnnounceError, LeaseDigest},
    layer::NoTransaction,
};

use super::{problem, resource, sql_blocks, text, token, vectors};
use crate::support::{
    database::{TestDatabase, on_both_databases},
    template,
};

on_both_databases!(tokens_are_admitted_in_sequence, answers_raise_the_fence,);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AdmissionVectors {
    #[serde(rename = "description")]
    _description: String,
    pub(super) sequences: Vec<Sequence>,
    answers: Vec<AnswerOf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Sequence {
    pub(super) name: String,
    pub(super) initial: Option<i64>,
    pub(super) steps: Vec<Step>,
}

impl Sequence {
    /// Returns the steps that this database supports: a distributed fence removes no rows, so its
    /// steps end before the first removal.
    pub(super) fn steps_of<DB: TestDatabase>(self) -> impl Iterator<Item = Step> {
        let removes = !DB::ABORTS_ON_ERROR || template::workers().is_empty();
        let steps = self.steps.into_iter();
        steps.take_while(move |step| removes || !matches!(step, Step::Remove { .. }))
    }
}

#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Step {
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
    Remove {
        max_token: Option<i64>,
    },
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Use {
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
pub(super) enum Ends {
    #[default]
    Commit,
    Rollback,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    Admitted,
    Raised,
    Stale,
    Announced,
    Superseded,
    Exhausted,
    Removed,
}

async fn tokens_are_admitted_in_sequence<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let vectors: AdmissionVectors = vectors("admission.json");
    for sequence in vectors.sequences {
        let name = resource(&sequence.name);
        begin_at(&fence, &name, sequence.initial).await;
        for step in sequence.steps_of::<DB>() {
            let (outcome, expected, max_token) = run(&fence, &name, &step).await;
            assert_eq!(outcome, expected, "{name}: {step:?}");
            let found = fence.inspect(&name).await.unwrap();
            assert_eq!(found, max_token, "{name}: {step:?}");
        }
    }
}

/// Runs the statements of the contract, which a program in another language would run, on SQLite.
/// On Postgres such a program calls the functions, which have their own test.
#[tokio::test]
async fn plain_statement_admits_the_same_tokens() {
    let db = Sqlite::fresh(2).await;
    let fence = db.fence();
    let contract = text("src/spec.md");
    let blocks = sql_blocks(&contract);
    let [admit, raise] = blocks[..] else {
        panic!("the contract does not have two blocks of statements: {blocks:?}");
    };
    let vectors: AdmissionVectors = vectors("admission.json");
    let mut run_plain = 0;
    for sequence in vectors.sequences {
        let name = resource(&sequence.name);
        begin_at(&fence, &name, sequence.initial).await;
        for step in sequence.steps {
            let (text, token, floor, expected, max_token) = match step {
                Step::Write {
                    token,
                    token_use,
                    ends: Ends::Commit,
                    outcome,
                    max_token,
                } => {
                    let floor = match token_use {
                        Use::SingleUse => token,
                        Use::Reusable => token - 1,
                    };
                    (admit, token, floor, outcome == Outcome::Admitted, max_token)
                }
                Step::Raise {
                    token, max_token, ..
                } => {
                    // The statement writes a row, unless the existing row already has this token,
                    // and no lease that the raise would end.
                    let raised = format!(
                        "SELECT count(*) FROM tower_fence.resources \
                         WHERE resource = '{name}' AND max_token = {token} - 1 \
                             AND (announced >= {token} OR announced_lease IS NULL)"
                    );
                    let moves = max_token == Some(token - 1) && db.number(&raised).await == 0;
                    (raise, token - 1, token - 1, moves, max_token)
                }
                Step::Write { .. } | Step::Announce { .. } | Step::Remove { .. } => {
                    run(&fence, &name, &step).await;
                    continue;
                }
            };
            run_plain += 1;
            let partition = crc32fast::hash(name.as_str().as_bytes()) & 0xff;
            let sql = text
                .replace("$1", &format!("'{name}'"))
                .replace("$2", &token.to_string())
                .replace("$3", &floor.to_string())
                .replace("$4", &partition.to_string());
            let mut conn = db.pool.acquire().await.unwrap();
            let mut left = Err(sqlx::Error::RowNotFound);
            for statement in sql.split(';') {
                if left.is_err() {
                    left = Sqlite::number(&mut conn, &format!("{statement} RETURNING max_token"))
                        .await;
                }
            }
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
        }
    }
    assert!(run_plain > 30, "{run_plain}");
}

/// Sets the `max_token` of a resource that has never been used.
pub(super) async fn begin_at<DB: TestDatabase>(
    fence: &Fence<DB>,
    name: &Resource,
    max_token: Option<i64>,
) {
    if let Some(max_token) = max_token {
        fence.raise(name, token(max_token + 1)).await.unwrap();
    }
    assert_eq!(fence.inspect(name).await.unwrap(), max_token);
}

/// Runs a step. Returns its outcome, the expected outcome, and the expected `max_token`.
pub(super) async fn run<DB: TestDatabase>(
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
            let found = match fence.announce(name, token(value), &digest, false).await {
                Ok(()) => Outcome::Announced,
                Err(AnnounceError::Superseded {
                    max_token,
                    was_last,
                }) => {
                    let next = Token::new(max_token + 1).ok();
                    assert_eq!(next.map(Token::get), expected, "{name}: {step:?}");
                    assert_eq!(was_last, expected_last, "{name}: {step:?}");
                    match next {
                        Some(_) => Outcome::Superseded,
                        None => Outcome::Exhausted,
                    }
                }
                Err(error) => panic!("{name}: {step:?}: {error:?}"),
            };
            (found, outcome, max_token)
        }
        Step::Remove { max_token } => {
            age(fence, name).await;
            let removed = fence.remove_idle(Duration::from_secs(60 * 60), 10).await;
            assert_eq!(removed.unwrap(), 1, "{name}: {step:?}");
            (Outcome::Removed, Outcome::Removed, max_token)
        }
    }
}

/// Sets the last use of a resource to a day ago.
pub(super) async fn age<DB: TestDatabase>(fence: &Fence<DB>, name: &Resource) {
    let day_ago = if DB::ABORTS_ON_ERROR {
        "updated_at - interval '1 day'"
    } else {
        "datetime(updated_at, '-1 day')"
    };
    let age = format!(
        "UPDATE tower_fence.resources SET updated_at = {day_ago} WHERE resource = '{name}'"
    );
    let mut conn = fence.pool().acquire().await.unwrap();
    DB::run(&mut conn, &age).await;
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

async fn answers_raise_the_fence<DB: TestDatabase>() {
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

/// Writes an entry if the path asks for it, and answers with the status in the path.
pub(super) async fn answer<DB: TestDatabase>(
    tx: Result<FencedTx<DB>, NoTransaction>,
    Path((status, entry)): Path<(u16, i64)>,
) -> StatusCode {
    if entry > 0 {
        let insert = format!("INSERT INTO ledger VALUES ({entry})");
        DB::run(&mut tx.unwrap(), &insert).await;
    }
    StatusCode::from_u16(status).unwrap()
}
