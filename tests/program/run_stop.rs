//! The processes of a command of `tower-fence run`: which of them are stopped, and the report about
//! them.

use serde_json::json;

use super::{
    command::{Notes, end, held, lives, serving, start, start_under, state},
    program::Served,
};
use crate::support::{
    eventually,
    process::{Process, send_signal},
};

/// `tower-fence run` adopts orphans, as process 1 of a container, or it runs below a process 1 that
/// never reads the status of an orphan.
#[tokio::test]
async fn orphans_are_reaped_while_the_command_runs() {
    const ADOPT: &str = "import ctypes, os, subprocess, sys\n\
        ctypes.CDLL(None).prctl(36, 1)\n\
        if sys.argv[1] == 'below': sys.exit(subprocess.call(sys.argv[2:]))\n\
        os.execv(sys.argv[2], sys.argv[2:])";
    let (_db, server) = serving().await;
    for place in ["as", "below"] {
        let notes = Notes::new();
        let orphan = notes.path("orphan");
        let script = format!(
            "(sh -c 'echo $$ > {0}' &); until grep -q . {0}; do sleep 0.02; done; \
             while test -d /proc/$(cat {0}); do sleep 0.02; done; exit 7",
            orphan.display()
        );
        let starter = ["env", "--default-signal", "python3", "-c", ADOPT, place];
        let running = start_under(&starter, &server.url, "sku-1", &[], &script);
        end(running).await.is(7);
    }
}

/// The end of the command does not wait for a zombie whose status no process reads.
#[tokio::test]
async fn a_zombie_in_the_group_does_not_delay_the_release() {
    let (_db, server) = serving().await;
    let notes = Notes::new();
    // The parent is in another group, and does not read the status of its child.
    let parent = "import os, sys, time\n\
        child = os.fork() or os._exit(0)\n\
        os.setpgid(0, 0)\n\
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)\n\
        open(sys.argv[1], 'w').write(f'{os.getpid()}\\n')\n\
        time.sleep(1000)";
    let script = format!(
        "python3 -c \"$PARENT\" {} > /dev/null 2>&1 & until test -s {0}; do sleep 0.02; done; exit 7",
        notes.path("parent").display()
    );
    let options = ["--grace", "10m"];
    let starter = format!("PARENT={parent}");
    let starter = ["env", "--default-signal", &starter];
    let running = start_under(&starter, &server.url, "sku-1", &options, &script);
    let parent = notes.has("parent").await;
    end(running).await.is(7);
    assert!(lives(&parent), "a process outside the group was killed");
    send_signal(parent.parse().unwrap(), "-KILL");
}

/// Starts a command that writes continuously, and stops it with TSTP, which is sent to `tower-fence
/// run`.
async fn stopped(server: &Served, notes: &Notes, ttl: &str) -> (Process, String) {
    let script = format!(
        "echo $$ > {}; while ! test -e {}; do echo x >> {}; sleep 0.02; done",
        notes.path("command").display(),
        notes.path("go").display(),
        notes.path("log").display()
    );
    let running = start(server, &["--ttl", ttl, "--wait", "20s"], &script);
    let command = notes.has("command").await;
    running.signal("-TSTP");
    let keeper = running.id().to_string();
    eventually("tower-fence run is stopped", async || {
        state(&keeper) == Some('T')
    })
    .await;
    // In state D, the signal was sent, and takes effect when the command has written to the disk.
    assert!(
        matches!(state(&command), Some('T' | 'D')),
        "the command must be stopped first"
    );
    (running, command)
}

#[tokio::test]
async fn stopped_command_resumes_with_the_run_process() {
    let (_db, server) = serving().await;
    let notes = Notes::new();
    let (running, command) = stopped(&server, &notes, "5m").await;
    running.signal("-CONT");
    eventually("the command continues", async || {
        state(&command) != Some('T')
    })
    .await;
    notes.note("go");
    end(running).await.is(0);
}

#[tokio::test]
async fn command_stopped_past_its_lease_writes_nothing_more() {
    let (_db, server) = serving().await;
    let notes = Notes::new();
    let (running, _) = stopped(&server, &notes, "5s").await;
    let written = notes.text("log");
    eventually("another client has the lease", async || {
        server
            .post("/locks/sku-1", &json!({"ttl_ms": 600_000}))
            .await
            .status
            == 201
    })
    .await;
    running.signal("-CONT");
    end(running).await.is(124);
    assert_eq!(notes.text("log"), written);
    assert!(
        held(&server).await,
        "the other client must still have the lease"
    );
}
