//! The behaviour of `tower-fence run` when its lease is lost.

use super::{
    command::{Notes, break_lease, end, expires, held, lives, serving, start, start_at},
    program::Served,
};
use crate::support::{
    eventually,
    process::built,
    proxy::{Passage, Proxy},
};

#[tokio::test]
async fn lost_lease_stops_the_command_and_its_group() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let traps = "trap 'echo got TERM; exit 3' TERM";
    let waits = "sleep 1000 & echo $! > NOTES/child; wait; echo never";
    let script = notes.script(&format!("{traps}; {waits}"));
    let running = start(&server, &["--ttl", "3s", "--wait", "20s"], &script);
    let child = notes.has("child").await;
    assert!(lives(&child));
    break_lease(&server).await;
    let ended = end(running).await;
    ended.is(124).says("the command was stopped");
    assert_eq!(ended.stdout, "got TERM\n");
    assert!(!lives(&child), "the child process was left");
}

/// The renewals continue when the server is back in time.
#[tokio::test]
async fn server_outage_shorter_than_the_ttl_loses_nothing() {
    let (db, mut server) = serving(&[]).await;
    let notes = Notes::new();
    let script = notes.script("until test -e NOTES/go; do sleep 0.02; done");
    let running = start(&server, &["--ttl", "10s"], &script);
    eventually!("the lease is held", held(&server).await);
    let addr = server.addr().to_string();
    server.signal("-TERM");
    assert!(server.exit().await.success());
    let server = Served::start(&db.url, &["--listen", &addr]).await;
    eventually!(
        "the lease is renewed",
        server.metric("tower_fence_leases_renewed_total").await > 0
    );
    notes.note("go");
    end(running).await.is(0);
    assert!(!held(&server).await);
}

/// A command that is frozen until its lease has expired does not continue.
#[tokio::test]
async fn program_paused_past_its_lease_stops_the_command() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let script = notes.script("echo runs > NOTES/runs; sleep 1000");
    let running = start(&server, &["--ttl", "5s", "--wait", "20s"], &script);
    notes.has("runs").await;
    running.signal("-STOP");
    expires(&server).await;
    running.signal("-CONT");
    end(running)
        .await
        .is(124)
        .says("no renewal succeeded in time");
    assert!(held(&server).await, "the other client has the lease");
}

#[tokio::test]
async fn command_that_lost_its_lease_is_reported_as_failed() {
    let (_db, server) = serving(&[]).await;
    let script = format!("'{}' break sku-1", built("tower-fence").display());
    // If the last renewal gets no answer, the release shows the loss.
    let proxy = Proxy::judging(server.addr(), |_, message| {
        Passage::CutAfter(0).when(message.starts_with(b"PUT "))
    })
    .await;
    for url in [&server.url, &proxy.url(&server.url)] {
        let ended = end(start_at(url, "sku-1", &[], &script)).await;
        ended.is(124).says("was lost before the command ended");
    }
}

/// When the lease is released, no process of the command is running.
#[tokio::test]
async fn remaining_processes_are_stopped_before_the_release() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let script = notes.script("sleep 1000 > /dev/null 2>&1 & echo $! > NOTES/child");
    end(start(&server, &[], &script)).await.is(0);
    assert!(!lives(&notes.has("child").await));
    assert!(!held(&server).await);
}
