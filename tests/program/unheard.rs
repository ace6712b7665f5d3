//! The program continues to work although its output is lost, for example because the disk of its
//! log is full, or because no process reads the pipe of its log.

use std::process::Command;

use serde_json::json;
use sqlx::Postgres;

use super::{
    command::{Notes, break_lease, end, lives, serving, start_under},
    program::{Served, ended, under},
};
use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    process::{Process, send_signal},
};

const UNHEARD: [&str; 3] = ["sh", "-c", r#"exec "$0" "$@" 2>/dev/full"#];

/// Standard error is a full pipe. The program holds the other end, and does not read it.
const BLOCKED: [&str; 5] = [
    "env",
    "--default-signal",
    "python3",
    "-c",
    "import os, sys\n\
     reader, pipe = os.pipe()\n\
     os.set_inheritable(reader, True)\n\
     os.set_blocking(pipe, False)\n\
     try:\n    while True: os.write(pipe, bytes(4096))\n\
     except BlockingIOError: os.set_blocking(pipe, True)\n\
     os.dup2(pipe, 2)\n\
     os.execv(sys.argv[1], sys.argv[1:])",
];

/// Returns a command for a server, which `starter` executes.
fn serve(starter: &[&str], db: &Fresh<Postgres>, drain_delay: &str) -> Command {
    let mut command = under(starter);
    command
        .args(["serve", "--listen", "127.0.0.1:0", "--log", "debug"])
        .args(["--drain-delay", drain_delay])
        .env("TOWER_FENCE_DATABASE_URL", &db.url);
    command
}

#[tokio::test]
async fn server_continues_and_stops_with_unread_output() {
    let db = Postgres::fresh(4).await;
    let mut server = Served::of(serve(&UNHEARD, &db, "0s")).await;
    assert_eq!(server.post("/locks/sku-1", &json!({})).await.status, 201);
    break_lease(&server).await;
    server.signal("-HUP");
    assert_eq!(server.get("/healthz").await.status, 200);
    server.signal("-TERM");
    assert!(server.exit().await.success());
}

#[tokio::test]
async fn an_unread_log_does_not_delay_the_loss() {
    for starter in [&UNHEARD[..], &BLOCKED] {
        let (_db, mut server) = serving(&[]).await;
        let notes = Notes::new();
        let script = notes.script("trap '' TERM; echo $$ > NOTES/id; exec sleep 1000");
        let options = ["--ttl", "3s", "--wait", "20s", "--grace", "1s"];
        let running = start_under(starter, &server.url, "sku-1", &options, &script);
        let child = notes.has("id").await;
        server.signal("-KILL");
        server.exit().await;
        end(running).await.is(124);
        assert!(!lives(&child), "the command was left");
    }
}

#[tokio::test]
async fn a_blocked_log_does_not_delay_a_stop() {
    let db = Postgres::fresh(4).await;
    for (delay, signals) in [("0s", 1), ("10m", 2)] {
        let mut server = Served::of(serve(&BLOCKED, &db, delay)).await;
        assert_eq!(server.post("/locks/sku-1", &json!({})).await.status, 201);
        break_lease(&server).await;
        server.signal("-TERM");
        if signals == 2 {
            eventually!(
                "the server stops",
                server.get("/readyz").await.text.contains("stopping")
            );
            server.signal("-TERM");
        }
        assert_eq!(server.exit().await.code(), Some(signals - 1));
    }
}

#[tokio::test]
async fn exit_statuses_are_the_same() {
    let (_db, server) = serving(&[]).await;
    for (arguments, status) in [
        (&["run", "--resource", "a", "/nonexistent"][..], 127),
        (&["inspect", ""], 64),
        (&["no-such-command"], 64),
    ] {
        for starter in [&UNHEARD[..], &BLOCKED] {
            let mut command = under(starter);
            command.env("TOWER_FENCE_URL", &server.url).args(arguments);
            ended(command).await.is(status);
        }
    }
}

/// No process reads the standard output of the server any more.
#[tokio::test]
async fn server_starts_although_its_output_fails() {
    let db = Postgres::fresh(2).await;
    let starter = ["sh", "-c", r#"exec "$0" "$@" >/dev/full"#];
    let running = Process::run(serve(&starter, &db, "0s"));
    eventually!("the server has started", running.log().contains("started"));
    send_signal(running.id(), "-TERM");
    end(running).await.is(0);
}
