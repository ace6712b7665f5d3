//! How long `tower-fence run` keeps its lease, and how long its command may run.

use super::{
    command::{Notes, end, held, serving, start},
    program::{run, words},
};
use crate::support::eventually;

#[tokio::test]
async fn lease_is_kept_for_the_minimum_time() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let script = notes.script("echo ended > NOTES/end; exit 7");
    let options = words("--at-least 5m --ttl 5s --wait 20s --owner nightly");
    let running = start(&server, &options, &script);
    notes.has("end").await;
    // The lease is renewed beyond its TTL, although the command failed long before.
    eventually!(
        "the lease is renewed",
        server.metric("tower_fence_leases_renewed_total").await > 2
    );
    let variables = [("TOWER_FENCE_URL", server.url.as_str())];
    let late = ["run", "--resource", "sku-1", "--", "echo", "never"];
    assert_eq!(run(&late, &variables).await.is(75).stdout, "");
    // After a signal, the lease expires at the end of the minimum time.
    running.signal("-TERM");
    end(running).await.is(7);
    let state = server.get("/locks/sku-1").await.json();
    assert!(state["ttl_ms"].as_u64().unwrap() > 60_000, "{state}");
    assert_eq!(state["owner"], "nightly");
}

/// The signal arrives while the command runs, and the command ends.
#[tokio::test]
async fn terminated_run_exits_before_the_minimum_time() {
    let (_db, server) = serving(&[]).await;
    for (at_least, is_held) in [("1ms", false), ("5m", true)] {
        let notes = Notes::new();
        let script = notes
            .script("trap 'exit 7' TERM; echo ready > NOTES/ready; while :; do sleep 0.05; done");
        let options = ["--at-least", at_least, "--ttl", "5m"];
        let running = start(&server, &options, &script);
        notes.has("ready").await;
        running.signal("-TERM");
        end(running).await.is(7);
        assert_eq!(held(&server).await, is_held, "{at_least}");
    }
}

#[tokio::test]
async fn a_lease_that_was_kept_long_enough_is_released() {
    let (_db, server) = serving(&[]).await;
    let running = start(&server, &["--at-least", "1s", "--ttl", "5m"], "exit 7");
    end(running).await.is(7);
    assert!(!held(&server).await);
}

#[tokio::test]
async fn a_command_that_runs_too_long_is_stopped() {
    let (_db, server) = serving(&[]).await;
    let options = ["--max-time", "300ms", "--grace", "300ms", "--ttl", "5m"];
    let script = "trap '' TERM; while :; do sleep 0.05; done";
    let ended = end(start(&server, &options, script)).await;
    ended.is(123).says("longer than --max-time");
    assert!(!held(&server).await);
    // While the command is being stopped, signals are forwarded to it.
    let notes = Notes::new();
    let options = ["--max-time", "3s", "--grace", "10m", "--ttl", "5m"];
    let script = notes.script("trap 'echo > NOTES/stops' TERM; while :; do sleep 0.05; done");
    let running = start(&server, &options, &script);
    notes.has("stops").await;
    running.signal("-QUIT");
    end(running).await.is(123);
    let running = start(&server, &["--max-time", "1h"], "exit 7");
    end(running).await.is(7);
}
