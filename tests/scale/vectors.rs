//! Runs the vectors of the contract through the library and the functions, over a distributed
//! fence.

use serde_json::Value;
use sqlx::{Connection, PgConnection, Postgres};
use tower_fence::{
    AdmitError, Fence, Resource, TokenUse,
    announce::{Announce, AnnounceError, LeaseDigest},
};

use super::distributed::token;
use crate::support::{
    citus::Cluster,
    functions::{Refused, admit, admit_reusable, is_refused, max_token, raise},
    repository,
};

/// Returns the sequences up to the first removal, because a distributed fence removes no rows.
fn sequences() -> Vec<(Resource, Option<i64>, Vec<Value>)> {
    let text = std::fs::read_to_string(repository().join("tests/vectors/admission.json")).unwrap();
    let vectors: Value = serde_json::from_str(&text).unwrap();
    let sequences = vectors["sequences"].as_array().unwrap().iter();
    sequences
        .map(|sequence| {
            let steps = sequence["steps"].as_array().unwrap().iter();
            let kept = steps.take_while(|step| step["do"] != "remove");
            let name = Resource::new(sequence["name"].as_str().unwrap()).unwrap();
            (name, sequence["initial"].as_i64(), kept.cloned().collect())
        })
        .collect()
}

fn refusal(error: AdmitError) -> &'static str {
    let AdmitError::Stale(_) = error else {
        panic!("{error:?}");
    };
    "stale"
}

async fn by_the_library(fence: &Fence<Postgres>, name: &Resource, step: &Value) -> &'static str {
    let value = token(step["token"].as_i64().unwrap());
    match step["do"].as_str().unwrap() {
        "write" => {
            let token_use = match step["use"] == "reusable" {
                true => TokenUse::Reusable,
                false => TokenUse::SingleUse,
            };
            match fence.begin(name, value, token_use).await {
                Ok(tx) if step["ends"] == "rollback" => drop(tx),
                Ok(tx) => tx.commit().await.unwrap(),
                Err(error) => return refusal(error),
            }
            "admitted"
        }
        "raise" => fence
            .raise(name, value)
            .await
            .map_or_else(refusal, |()| "raised"),
        "announce" => {
            let lease = LeaseDigest::of(step["lease"].as_str().unwrap());
            match fence.announce(name, value, &lease).await {
                Ok(()) => "announced",
                Err(AnnounceError::Superseded { next, was_last, .. }) => {
                    assert_eq!(Some(next.get()), step["next"].as_i64(), "{name}: {step}");
                    assert_eq!(was_last, step["was_last"] == true, "{name}: {step}");
                    "superseded"
                }
                Err(AnnounceError::Exhausted { .. }) => "exhausted",
                Err(error) => panic!("{name}: {step}: {error:?}"),
            }
        }
        other => panic!("{other}"),
    }
}

fn outcome(answer: Result<i64, Refused>, success: &'static str) -> &'static str {
    match answer {
        Ok(_) => success,
        refused => {
            is_refused(refused, "TF412");
            "stale"
        }
    }
}

async fn by_the_functions(conn: &mut PgConnection, name: &str, step: &Value) -> &'static str {
    let value = step["token"].as_i64().unwrap();
    if step["do"] == "raise" {
        return outcome(raise(conn, name, value).await, "raised");
    }
    let mut tx = conn.begin().await.unwrap();
    let admitted = match step["use"] == "reusable" {
        true => admit_reusable(&mut tx, name, value).await,
        false => admit(&mut tx, name, value).await,
    };
    match admitted.is_ok() && step["ends"] != "rollback" {
        true => tx.commit().await.unwrap(),
        false => tx.rollback().await.unwrap(),
    }
    outcome(admitted, "admitted")
}

#[tokio::test]
async fn a_distributed_fence_admits_the_same_sequences() {
    let cluster = Cluster::with_distributed_fence().await;
    let fence = cluster.fence().await;
    let mut steps_run = 0;
    for (name, initial, steps) in sequences() {
        if let Some(initial) = initial {
            fence.raise(&name, token(initial + 1)).await.unwrap();
        }
        for step in steps {
            let found = by_the_library(&fence, &name, &step).await;
            assert_eq!(step["outcome"], found, "{name}: {step}");
            let left = fence.inspect(&name).await.unwrap();
            assert_eq!(step["max_token"].as_i64(), left, "{name}: {step}");
            steps_run += 1;
        }
    }
    assert!(steps_run > 30, "{steps_run}");
}

#[tokio::test]
async fn delegated_functions_admit_the_same_sequences() {
    let cluster = Cluster::with_distributed_fence().await;
    let fence = cluster.fence().await;
    let mut conn = cluster.connect().await;
    let mut steps_run = 0;
    for (name, initial, steps) in sequences() {
        if let Some(initial) = initial {
            fence.raise(&name, token(initial + 1)).await.unwrap();
        }
        for step in steps {
            if step["do"] == "announce" {
                by_the_library(&fence, &name, &step).await;
                continue;
            }
            let found = by_the_functions(&mut conn, name.as_str(), &step).await;
            assert_eq!(step["outcome"], found, "{name}: {step}");
            let left = max_token(&mut conn, name.as_str()).await.unwrap();
            assert_eq!(step["max_token"].as_i64(), left, "{name}: {step}");
            steps_run += 1;
        }
    }
    assert!(steps_run > 30, "{steps_run}");
}
