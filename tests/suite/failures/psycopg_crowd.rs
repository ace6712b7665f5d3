//! A crowd that writes to one resource: half of it through the layer, over HTTP, and half in Python, through
//! the functions in Postgres.

use std::time::Duration;

use axum::{Router, http::request::Parts, routing::post};
use futures_util::future::join_all;
use serde::Deserialize;
use sqlx::Postgres;
use tokio::time::sleep;
use tower_fence::{Admitted, FenceLayer, PgFencedTx, Resource};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    http::Server,
    process::{Process, python},
};

/// Of each half.
const WRITERS: usize = 4;
const STOCK: i64 = 1_000_000;

/// Each token is drawn once.
const FRESH: &str = "SELECT nextval('tokens')";
/// Nine of ten are of holders that have lost their leases long ago.
const MOSTLY_STALE: &str = "SELECT CASE WHEN random() < 0.1 THEN nextval('tokens') \
     ELSE greatest(1, last_value - (random() * 50)::bigint) END FROM tokens";

#[derive(Clone, Copy, Debug, Deserialize)]
struct Half {
    acknowledged: i64,
    refused: i64,
}

#[derive(Debug)]
struct Outcome {
    layer: Half,
    psycopg: Half,
    /// By how many the stock fell.
    fell: i64,
    /// How many writes came behind one with the same or a newer token.
    out_of_order: i64,
}

impl Outcome {
    fn is_sound(&self) -> bool {
        let acknowledged = self.layer.acknowledged + self.psycopg.acknowledged;
        self.fell == acknowledged && self.out_of_order == 0
    }
}

async fn decrement(mut tx: PgFencedTx, admitted: Admitted) {
    let left = Postgres::number(&mut tx, "SELECT n FROM stock")
        .await
        .unwrap()
        - 1;
    sleep(Duration::from_millis(2)).await;
    let token = admitted.token;
    let write = format!("UPDATE stock SET n = {left}; INSERT INTO writes VALUES ({left}, {token})");
    Postgres::execute(&mut tx, &write).await.unwrap();
}

/// Writes until the tokens have come to the last one. Each writer has a server and a fence of its own:
/// those that share one wait for each other outside of the database.
async fn layer_half(db: &Fresh<Postgres>, draw: &str, last: i64) -> Half {
    let one = async || {
        let layer = FenceLayer::new(db.fence(), |_: &Parts| Resource::new("sku-1"));
        let app = Router::new().route("/", post(decrement)).route_layer(layer);
        let server = Server::start(app).await;
        let mut half = Half {
            acknowledged: 0,
            refused: 0,
        };
        loop {
            let token = db.number(draw).await;
            if token > last {
                return half;
            }
            // Some are late with their tokens.
            sleep(Duration::from_millis(rand::random_range(0..3))).await;
            let answer = server.write("/", token).await;
            if answer.status == 200 {
                half.acknowledged += 1;
            } else {
                answer.is_problem(412, "stale-token");
                half.refused += 1;
            }
        }
    };
    let halves = join_all((0..WRITERS).map(|_| one())).await;
    Half {
        acknowledged: halves.iter().map(|half| half.acknowledged).sum(),
        refused: halves.iter().map(|half| half.refused).sum(),
    }
}

/// Both halves at once. In Python the check and the write are one transaction, `together`, or `apart`.
async fn crowd(db: &Fresh<Postgres>, draw: &str, last: i64, check: &str) -> Outcome {
    db.execute(&format!(
        "DROP SEQUENCE IF EXISTS tokens; CREATE SEQUENCE tokens; \
         DROP TABLE IF EXISTS writes; CREATE TABLE writes (left_over bigint, token bigint); \
         DELETE FROM fence_resources; \
         DELETE FROM stock; INSERT INTO stock VALUES ('sku-1', {STOCK})"
    ))
    .await;
    let mut command = python("tests/suite/failures/psycopg_crowd.py");
    command.env("DATABASE_URL", &db.url).args([
        &WRITERS.to_string(),
        draw,
        &last.to_string(),
        check,
    ]);
    let mut python = Process::run(command);
    eventually("psycopg draws tokens", async || {
        db.number("SELECT is_called::int::bigint FROM tokens").await == 1
    })
    .await;
    let layer = layer_half(db, draw, last).await;
    let status = python.exit().await;
    assert!(status.success(), "{}", python.log());
    let outcome = Outcome {
        layer,
        psycopg: serde_json::from_str(&python.stdout()).unwrap(),
        fell: STOCK - db.number("SELECT n FROM stock").await,
        out_of_order: db
            .number(
                "SELECT count(*) FROM (SELECT token <= lag(token) OVER (ORDER BY left_over DESC) \
                 AS is_older FROM writes) AS w WHERE is_older",
            )
            .await,
    };
    println!("{check}: {outcome:?}");
    outcome
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_layer_and_psycopg_exclude_each_other() {
    let db = Postgres::fresh(10).await;
    let outcome = crowd(&db, FRESH, 600, "together").await;
    assert!(outcome.is_sound(), "{outcome:?}");
    let halves = [outcome.layer, outcome.psycopg];
    assert!(
        halves.iter().all(|half| half.acknowledged > 0),
        "{outcome:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_stale_token_of_a_storm_gets_through() {
    let db = Postgres::fresh(10).await;
    let outcome = crowd(&db, MOSTLY_STALE, 150, "together").await;
    assert!(outcome.is_sound(), "{outcome:?}");
    let halves = [outcome.layer, outcome.psycopg];
    assert!(
        halves.iter().all(|half| half.refused > half.acknowledged),
        "{outcome:?}"
    );
}

/// The same crowd and the same storm find those who commit the check before they write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_in_a_transaction_of_its_own_is_caught() {
    let db = Postgres::fresh(10).await;
    for (draw, last) in [(FRESH, 600), (MOSTLY_STALE, 150)] {
        let mut caught = false;
        for _ in 0..3 {
            caught = caught || !crowd(&db, draw, last, "apart").await.is_sound();
        }
        assert!(
            caught,
            "the crowd did not find the broken check: it proves nothing"
        );
    }
}
