//! The program continues to work although its output is lost, for example because the disk of its
//! log is full.

use reqwest::Method;
use serde_json::json;
use sqlx::Postgres;

use super::{
    command::{Notes, end, lives, serving},
    program::{Served, ended, under},
};
use crate::support::{
    database::TestDatabase,
    process::{Process, send_signal},
};

const UNHEARD: [&str; 3] = ["sh", "-c", r#"exec "$0" "$@" 2>/dev/full"#];

#[tokio::test]
async fn server_continues_and_stops_with_unread_output() {
    let db = Postgres::fresh(4).await;
    let mut command = under(&UNHEARD);
    command
        .args(["serve", "--listen", "127.0.0.1:0", "--log", "debug"])
        .env("TOWER_FENCE_DATABASE_URL", &db.url);
    let mut server = Served::of(command).await;
    assert_eq!(server.post("/locks/sku-1", &json!({})).await.status, 201);
    let broken = server.request(Method::POST, "/locks/sku-1/break");
    assert_eq!(broken.send().await.unwrap().status(), 204);
    server.signal("-HUP");
    assert_eq!(server.get("/healthz").await.status, 200);
    server.signal("-TERM");
    assert!(server.exit().await.success());
}

#[tokio::test]
async fn lost_lease_stops_the_command_and_its_group() {
    let (_db, server) = serving().await;
    let notes = Notes::new();
    let script = format!(
        "(trap '' TERM; echo ready; exec sleep 1000) & echo $! > {}; wait",
        notes.path("child").display()
    );
    let mut command = under(&UNHEARD);
    command
        .env("TOWER_FENCE_URL", &server.url)
        .args(["run", "--resource", "sku-1", "--grace", "1s", "--ttl", "5s"])
        .args(["--", "sh", "-c", &script]);
    let mut running = Process::run(command);
    running.prints("ready", 1).await;
    let child = notes.has("child").await;
    let broken = server.request(Method::POST, "/locks/sku-1/break");
    broken.send().await.unwrap();
    end(running).await.is(124);
    assert!(!lives(&child), "the child process was left");
}

#[tokio::test]
async fn exit_statuses_are_the_same() {
    let (_db, server) = serving().await;
    for (arguments, status) in [
        (&["run", "--", "/nonexistent"][..], 127),
        (&["inspect", ""], 64),
        (&["no-such-command"], 64),
    ] {
        let mut command = under(&UNHEARD);
        command.env("TOWER_FENCE_URL", &server.url).args(arguments);
        ended(command).await.is(status);
    }
}

/// The reader of the server's standard output is gone.
#[tokio::test]
async fn server_starts_although_its_output_fails() {
    let db = Postgres::fresh(2).await;
    let mut command = under(&["sh", "-c", r#"exec "$0" "$@" >/dev/full"#]);
    command
        .args(["serve", "--listen", "127.0.0.1:0"])
        .env("TOWER_FENCE_DATABASE_URL", &db.url);
    let running = Process::run(command);
    crate::support::eventually("the server has started", async || {
        running.log().contains("started")
    })
    .await;
    send_signal(running.id(), "-TERM");
    end(running).await.is(0);
}
