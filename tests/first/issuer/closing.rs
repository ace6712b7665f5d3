//! An issuer whose application shuts down.

use std::time::Duration;

use serde_json::json;
use sqlx::{Postgres, Sqlite};
use tokio::{sync::oneshot, time::timeout};
use tower_fence::{
    issuer::Issuer,
    lease::{LeaseAdmin, MemoryLeases, PostgresLeases},
};

use crate::support::{
    database::TestDatabase,
    eventually,
    http::{Answer, Server},
    lease::{LONG, grant, sku, waiters},
};

#[tokio::test]
async fn waiting_requests_end_when_the_application_stops() {
    let db = Sqlite::fresh(2).await;
    waiting_requests_end(MemoryLeases::new(db.fence())).await;
}

/// This store does not grant a lease at the first poll of the request.
#[tokio::test]
async fn waiting_requests_in_postgres_end_when_the_application_stops() {
    let db = Postgres::fresh(4).await;
    waiting_requests_end(PostgresLeases::new(db.fence())).await;
}

async fn waiting_requests_end(store: impl LeaseAdmin + Clone) {
    let (stop, stopped) = oneshot::channel::<()>();
    let issuer = Issuer::new(store.clone()).close_on(async {
        let _ = stopped.await;
    });
    let server = Server::start(issuer.router()).await;
    let first = grant(&store, &sku(), LONG).await;
    let wait = || server.post("/sku-1").json(&json!({ "wait_ms": 60_000 }));
    let waiting = tokio::spawn(Answer::to(wait()));
    eventually!("the request waits", waiters(&store).await == 1);
    stop.send(()).unwrap();
    let ended = timeout(Duration::from_secs(10), waiting).await;
    let answer = ended.expect("the waiter was not answered").unwrap();
    answer.is_problem(503, "server-busy");
    assert_eq!(answer.headers["retry-after"], "1");
    eventually!("the waiter has left the queue", waiters(&store).await == 0);
    // A later request does not wait, and a free lease is still granted.
    let later = timeout(Duration::from_secs(10), Answer::to(wait())).await;
    let later = later.expect("the request waits");
    later.is_problem(503, "server-busy");
    store.release(&sku(), &first.id).await.unwrap();
    assert_eq!(Answer::to(wait()).await.status, 201);
}
