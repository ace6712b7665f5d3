//! How the server ends.

use reqwest::Response;
use serde_json::json;
use sqlx::{Connection, PgConnection, Postgres};
use tokio::{io::AsyncReadExt, net::TcpStream, task::JoinHandle};

use super::program::Served;
use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    http::Answer,
};

async fn waits(server: &Served, line: u64) {
    eventually("they wait", async || {
        server.get("/locks/sku-1").await.json()["waiters"] == line
    })
    .await;
}

/// Holds the row of `sku-1`, for which a grant waits.
async fn blocked(db: &Fresh<Postgres>) -> PgConnection {
    let mut conn = PgConnection::connect(&db.url).await.unwrap();
    let sql = "INSERT INTO fence_resources (resource, max_token) VALUES ('sku-1', 1) \
               ON CONFLICT (resource) DO NOTHING; BEGIN; \
               SELECT * FROM fence_resources WHERE resource = 'sku-1' FOR UPDATE";
    Postgres::execute(&mut conn, sql).await.unwrap();
    conn
}

/// A renewal that waits for the row of `sku-1`.
struct Renewal {
    row: PgConnection,
    answer: JoinHandle<reqwest::Result<Response>>,
}

impl Renewal {
    async fn under_way(server: &Served, db: &Fresh<Postgres>) -> Self {
        let lease = server.post("/locks/sku-1", &json!({})).await.json();
        let row = blocked(db).await;
        // A new token raises the fence, and so waits for the row.
        let renewal = server
            .client
            .put(server.url("/locks/sku-1"))
            .header("Lease-Id", lease["lease_id"].as_str().unwrap())
            .json(&json!({"new_token": true}));
        let answer = tokio::spawn(renewal.send());
        eventually("it waits for the row", async || {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                       AND datname = current_database()";
            db.number(sql).await > 0
        })
        .await;
        Self { row, answer }
    }

    /// What it is answered.
    async fn answered(self) -> Answer {
        Answer::read(self.answer.await.unwrap().unwrap()).await
    }
}

#[tokio::test]
async fn those_who_wait_in_line_are_answered_when_it_stops() {
    let db = Postgres::fresh(4).await;
    for signal in ["-TERM", "-INT"] {
        let mut server = Served::start(&db.url, &[]).await;
        let holder = server.post("/locks/sku-1", &json!({})).await.json();
        let waiters = [1, 2, 3].map(|_| {
            let body = json!({"wait_ms": 60_000});
            let request = server
                .request(reqwest::Method::POST, "/locks/sku-1")
                .json(&body);
            tokio::spawn(Answer::to(request))
        });
        waits(&server, 3).await;
        server.signal(signal);
        for waiter in waiters {
            let answer = waiter.await.unwrap();
            answer.is_problem(503, "server-busy");
        }
        assert!(server.exit().await.success());
        // Nobody stands in line any more, and the lease is its holder's.
        assert_eq!(db.number("SELECT count(*) FROM fence_waiters").await, 0);
        let server = Served::start(&db.url, &[]).await;
        let release = server.client.delete(server.url("/locks/sku-1"));
        let release = release.header("Lease-Id", holder["lease_id"].as_str().unwrap());
        assert_eq!(Answer::to(release).await.status, 204);
    }
}

#[tokio::test]
async fn a_request_under_way_is_answered_when_it_stops() {
    let db = Postgres::fresh(4).await;
    let mut server = Served::start(&db.url, &[]).await;
    let mut renewal = Renewal::under_way(&server, &db).await;
    let mut idle = server.connect().await;
    server.signal("-TERM");
    // Whoever has no request is let go, and nobody new comes in.
    assert!(matches!(idle.read(&mut [0]).await, Ok(0) | Err(_)));
    assert!(TcpStream::connect(server.addr()).await.is_err());
    Postgres::execute(&mut renewal.row, "COMMIT").await.unwrap();
    let renewed = renewal.answered().await;
    assert_eq!(renewed.status, 200, "{renewed:?}");
    assert!(server.exit().await.success());
}

#[tokio::test]
async fn what_does_not_end_in_time_is_answered_all_the_same() {
    let db = Postgres::fresh(4).await;
    let mut server = Served::start(&db.url, &["--drain", "100ms"]).await;
    let renewal = Renewal::under_way(&server, &db).await;
    server.signal("-TERM");
    renewal.answered().await.is_problem(503, "server-busy");
    assert!(server.exit().await.success());
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once() {
    let db = Postgres::fresh(4).await;
    let mut server = Served::start(&db.url, &["--drain", "10m"]).await;
    let renewal = Renewal::under_way(&server, &db).await;
    server.signal("-TERM");
    eventually("it stops", async || server.log().contains("stopping")).await;
    server.signal("-TERM");
    assert_eq!(server.exit().await.code(), Some(1));
    assert!(renewal.answer.await.unwrap().is_err());
}
