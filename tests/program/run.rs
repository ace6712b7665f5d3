//! `tower-fence run`: a command under a lease.

use std::time::Duration;

use serde_json::json;
use sqlx::Postgres;
use tokio::time::timeout;

use super::{
    command::{Notes, are_waiting, end, held, serving, start, start_on, start_under},
    program::{HOLDER, Served, run, run_on, serving_with_secrets, under, words},
};
use crate::support::{
    database::TestDatabase,
    eventually,
    process::{Process, psql, send_signal},
};

#[tokio::test]
async fn command_receives_its_lease_and_its_status_is_returned() {
    let (db, server) = serving(&[]).await;
    let script = "echo \"$FENCING_TOKEN|$FENCING_TOKEN_NUMBER|$LEASE_RESOURCE\"; \
                  env | cut -d = -f 1; exit 7";
    let ended = end(start(&server, &["--owner", "me"], script)).await;
    let (values, names) = ended.is(7).stdout.split_once('\n').unwrap();
    assert_eq!(values, r#"1000000001;resource="sku-1"|1000000001|sku-1"#);
    // With the lease id, the command could release the lease, and `run` would then lose it.
    assert_contains!(names, "FENCING_TOKEN");
    assert!(!names.contains("LEASE_ID"), "{names}");
    assert_eq!(ended.stderr, "");
    assert!(!held(&server).await, "it was released");
    // The command has a token that is admitted.
    let admit = "SELECT tower_fence.admit('sku-1', 1000000001)";
    assert_eq!(db.number(admit).await, 1_000_000_001);
}

#[tokio::test]
async fn a_command_writes_several_times_with_a_reusable_token() {
    let (db, server) = serving(&[]).await;
    db.execute("CREATE TABLE writes (n int)").await;
    let script = r#"for n in 1 2; do "$@" -c BEGIN \
        -c "SELECT tower_fence.admit('$LEASE_RESOURCE', $FENCING_TOKEN_NUMBER, true)" \
        -c "INSERT INTO writes VALUES ($n)" -c COMMIT || exit; done"#;
    let mut command = under(&["env", "--default-signal"]);
    let psql = psql(&db.url);
    command
        .env("TOWER_FENCE_URL", &server.url)
        .args(words("run --resource sku-1 -- sh -c"))
        .args([script, "sh"])
        .arg(psql.get_program())
        .args(psql.get_args())
        .args(["-v", "ON_ERROR_STOP=1"]);
    end(Process::run(command)).await.is(0);
    assert_eq!(db.number("SELECT sum(n) FROM writes").await, 3);
    assert!(!held(&server).await, "it was released");
}

#[tokio::test]
async fn statuses_are_as_documented() {
    let (_db, server) = serving(&[]).await;
    let server_url = [("TOWER_FENCE_URL", server.url.as_str())];
    for (command, status) in [
        (&["true"][..], 0),
        (&["--", "sh", "-c", "exit 255"], 255),
        (&["--", "sh", "-c", "kill -9 $$"], 137),
        (&["/nowhere/command"], 127),
        (&["--", "/etc/passwd"], 126),
        (&[], 64),
    ] {
        let arguments = [&["run", "--resource", "a"], command].concat();
        run(&arguments, &server_url).await.is(status);
    }
    // Each lease was released, including those of commands that did not start.
    assert_eq!(server.get("/locks").await.json()["leases"], json!([]));
    let nowhere = words("run --resource a --url http://127.0.0.1:1 true");
    let refused = run(&nowhere, &[]).await;
    refused.is(69).says("127.0.0.1:1");

    let long = json!({"ttl_ms": 600_000});
    server.post("/locks/true", &long).await;
    let refused = run(&["run", "--resource", "true", "true"], &server_url).await;
    refused.is(75).says("true is held by another holder");
    for (status, is_silent) in [(0, true), (7, false)] {
        let conflict = format!("run --resource true -E {status} /bin/true");
        let skipped = run(&words(&conflict), &server_url).await;
        assert_eq!(skipped.is(status).stderr.is_empty(), is_silent, "{status}");
    }
    let (_db, closed) = serving_with_secrets().await;
    let closed_url = [("TOWER_FENCE_URL", closed.url.as_str())];
    // The refusal is immediate, although the wait would be unlimited.
    let waits = words("run --resource a --wait forever true");
    run(&waits, &closed_url).await.is(77);
    let with_secret = [closed_url[0], ("TOWER_FENCE_SECRET", HOLDER)];
    run(&waits, &with_secret).await.is(0);
}

#[tokio::test]
async fn run_requires_a_resource_that_is_not_blank() {
    let (_db, server) = serving(&[]).await;
    let url = ("TOWER_FENCE_URL", server.url.as_str());
    let empty = ("TOWER_FENCE_RESOURCE", "");
    let refused = run(&["run", "--", "true"], &[url]).await;
    refused.is(64).says("--resource <NAME>");
    // An unknown option before the command is not a command.
    let refused = run(&["run", "--resouce", "nightly", "true"], &[url]).await;
    refused.is(64).says("--resouce");
    for blank in ["", " "] {
        let named = ["run", "--resource", blank, "true"];
        run(&named, &[url]).await.is(64).says("is blank");
    }
    let refused = run(&["run", "true"], &[url, empty]).await;
    refused.is(64).says("is blank");
}

#[tokio::test]
async fn run_waits_in_the_queue() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let script = notes.script("until test -e NOTES/go; do sleep 0.02; done; echo one");
    let first = start(&server, &[], &script);
    eventually!("the first command has the lease", held(&server).await);
    let second = start(&server, &["--wait", "forever"], "echo two");
    are_waiting(&server, 1).await;
    notes.note("go");
    assert_eq!(end(first).await.is(0).stdout, "one\n");
    assert_eq!(end(second).await.is(0).stdout, "two\n");
}

/// `run` repeats its request if the server's limit for waits is shorter than its own.
#[tokio::test]
async fn run_waits_longer_than_the_server_limit() {
    let db = Postgres::fresh(4).await;
    for limit in ["2s", "0s"] {
        let server = Served::start(&db.url, &["--max-wait", limit]).await;
        server.post("/locks/sku-1", &json!({"ttl_ms": 3_000})).await;
        let waiting = start(&server, &["--wait", "1h"], "echo got");
        assert_eq!(end(waiting).await.is(0).stdout, "got\n", "{limit}");
    }
}

#[tokio::test]
async fn a_signal_ends_the_wait() {
    let (_db, server) = serving(&[]).await;
    let long = json!({"ttl_ms": 600_000});
    server.post("/locks/sku-1", &long).await;
    let waiting = start(&server, &["--wait", "forever"], "echo never");
    are_waiting(&server, 1).await;
    waiting.signal("-TERM");
    assert_eq!(end(waiting).await.is(143).stdout, "");
    are_waiting(&server, 0).await;
}

/// Otherwise the store would keep the position for three seconds, and grant the lease to a process
/// that has ended.
#[tokio::test]
async fn refused_command_leaves_the_queue() {
    let (_db, server) = serving(&[]).await;
    let held = json!({"ttl_ms": 600_000});
    assert_eq!(server.post("/locks/sku-1", &held).await.status, 201);
    let refused = start(&server, &["--wait", "300ms"], "echo never");
    assert_eq!(end(refused).await.is(75).stdout, "");
    // A step of the request may still be in progress.
    let left = timeout(Duration::from_secs(2), are_waiting(&server, 0));
    left.await.unwrap();
}

#[tokio::test]
async fn a_command_that_lasts_longer_than_the_lease_keeps_it() {
    let (_db, server) = serving(&[]).await;
    let script = "sleep 7; echo done";
    let mut running = start(&server, &["--ttl", "3s", "--wait", "20s"], script);
    eventually!("the lease is held", held(&server).await);
    // Another command does not get the lease, and each renewal is counted.
    let other = start(&server, &[], "echo other");
    end(other).await.is(75);
    running.prints("done", 1).await;
    end(running).await.is(0);
    let renewed = server.metric("tower_fence_leases_renewed_total").await;
    assert!(renewed >= 3, "{renewed}");
}

#[tokio::test]
async fn signals_are_passed_on() {
    let (_db, server) = serving(&[]).await;
    let names = ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"];
    let traps = names
        .map(|name| format!("trap 'echo {name}' {name}; "))
        .concat();
    let script = format!("{traps} trap 'exit 9' ALRM; echo ready $$; while :; do sleep 0.01; done");
    let mut running = start(&server, &[], &script);
    running.prints("ready", 1).await;
    for name in names {
        running.signal(&format!("-{name}"));
        running.prints(&format!("{name}\n"), 1).await;
    }
    let stdout = running.stdout();
    let (_, pid) = stdout.lines().next().unwrap().split_once(' ').unwrap();
    assert!(held(&server).await, "the command runs and has its lease");
    send_signal(pid.parse().unwrap(), "-ALRM");
    end(running).await.is(9);
    assert!(!held(&server).await);
    let running = start(&server, &[], "echo ready; sleep 1000");
    eventually!("the lease is held", held(&server).await);
    eventually!("the command runs", running.stdout() == "ready\n");
    running.signal("-TERM");
    end(running).await.is(143);
}

#[tokio::test]
async fn direct_run_acquires_its_lease_in_postgres() {
    let db = Postgres::fresh(2).await;
    let url = [("TOWER_FENCE_DATABASE_URL", db.url.as_str())];
    let direct = words("run --direct --resource sku-1");
    let script = ["sh", "-c", "echo $FENCING_TOKEN_NUMBER"];
    let ended = run(&[&direct[..], &script].concat(), &url).await;
    let token: i64 = ended.is(0).stdout.trim().parse().unwrap();
    let admit = format!("SELECT tower_fence.admit('sku-1', {token})");
    assert_eq!(db.number(&admit).await, token);
    let held = "SELECT count(*) FROM tower_fence.held_leases";
    assert_eq!(db.number(held).await, 0);
    let acquire = "SELECT tower_fence.acquire('sku-1', '1 min')";
    db.execute(acquire).await;
    let direct = [&direct[..], &["true"]].concat();
    run(&direct, &url).await.is(75);
    run_on("postgres://127.0.0.1:1/shop", &direct).await.is(69);
}

/// Many instances start at the same time, as on many machines, and one runs at a time.
#[tokio::test]
async fn one_runs_at_a_time() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let alone = "mkdir NOTES/alone || echo overlap >> NOTES/log";
    let end_alone = "rmdir NOTES/alone; echo ran >> NOTES/log";
    let script = |pause| notes.script(&format!("{alone}; sleep {pause}; {end_alone}"));
    let all = (0..8).map(|_| start(&server, &["--wait", "1m"], &script(0.05)));
    for one in all.collect::<Vec<_>>() {
        end(one).await.is(0);
    }
    assert_eq!(notes.text("log"), "ran\n".repeat(8));
    // The same check fails if each instance has its own lease.
    let all = (0..8).map(|number| start_on(&number.to_string(), &server, &[], &script(0.5)));
    for one in all.collect::<Vec<_>>() {
        end(one).await;
    }
    assert_contains!(notes.text("log"), "overlap");
}

#[tokio::test]
async fn signals_that_are_ignored_stay_ignored() {
    let (_db, server) = serving(&[]).await;
    let starter = ["env", "--default-signal", "--ignore-signal=HUP"];
    let script = "echo ready; while :; do sleep 0.01; done";
    let mut running = start_under(&starter, &server.url, "sku-1", &[], script);
    running.prints("ready", 1).await;
    running.signal("-HUP");
    // Signals may arrive in any order, so a second one may come first. A command that handles both
    // would end with either.
    running.signal("-TERM");
    end(running).await.is(143);
}

#[tokio::test]
async fn server_refusal_names_the_option() {
    let (_db, server) = serving(&[]).await;
    let variables = [("TOWER_FENCE_URL", server.url.as_str())];
    for (option, value, limits) in [
        ("--ttl", "1h", "100 to 600000"),
        ("--lock-delay", "5h", "0 to 60000"),
    ] {
        let arguments = ["run", "--resource", "a", option, value, "--", "true"];
        let refused = run(&arguments, &variables).await;
        let text = format!("tower-fence: invalid {option}: must be from {limits} milliseconds\n");
        assert_eq!(refused.is(64).stderr, text);
    }
    // The program itself refuses a TTL that no server accepts.
    let short = ["run", "--resource", "a", "--ttl", "10ms", "--", "true"];
    run(&short, &variables).await.is(64).says("--ttl");
}
