//! The processes of a command of `tower-fence run`: which of them are stopped, and the report about
//! them.

use super::{
    command::{Notes, break_lease, end, expires, held, lives, serving, start, start_under, state},
    program::{Served, name},
};
use crate::support::{
    eventually,
    process::{Process, send_signal},
};

/// `tower-fence run` adopts orphans as process 1 of a container does, or it runs below a process 1
/// that never reads the status of an orphan.
#[tokio::test]
async fn orphans_are_reaped_while_the_command_runs() {
    const ADOPT: &str = "import ctypes, os, subprocess, sys\n\
        ctypes.CDLL(None).prctl(36, 1)\n\
        if sys.argv[1] == 'below': sys.exit(subprocess.call(sys.argv[2:]))\n\
        os.execv(sys.argv[2], sys.argv[2:])";
    let (_db, server) = serving(&[]).await;
    for place in ["as", "below"] {
        let notes = Notes::new();
        let script = notes.script(
            "(sh -c 'echo $$ > NOTES/orphan' &); until grep -q . NOTES/orphan; do sleep 0.02; done; \
             while test -d /proc/$(cat NOTES/orphan); do sleep 0.02; done; exit 7",
        );
        let starter = ["env", "--default-signal", "python3", "-c", ADOPT, place];
        let running = start_under(&starter, &server.url, "sku-1", &[], &script);
        end(running).await.is(7);
    }
}

/// The end of the command does not wait for a zombie whose status no process reads.
#[tokio::test]
async fn a_zombie_in_the_group_does_not_delay_the_release() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let (command, zombie) = (notes.path("command"), notes.path("zombie"));
    // The parent starts `tower-fence run`, so it is not a process of the command. Its child joins
    // the group of the command.
    let parent = "import os, subprocess, sys, time\n\
        command, zombie = sys.argv[1:3]\n\
        running = subprocess.Popen(sys.argv[3:])\n\
        while not os.path.exists(command) or not open(command).read(): time.sleep(0.02)\n\
        if (child := os.fork()) == 0:\n    os.setpgid(0, int(open(command).read()))\n    os._exit(0)\n\
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)\n\
        open(zombie, 'w').write('\\n')\n\
        sys.exit(running.wait())";
    let starter = ["env", "--default-signal", "python3", "-c", parent];
    let starter = [&starter[..], &[name(&command), name(&zombie)]].concat();
    let waits = "until test -s NOTES/zombie; do sleep 0.02; done";
    let script = notes.script(&format!("echo $$ > NOTES/command; {waits}; exit 7"));
    let options = ["--grace", "10m"];
    let running = start_under(&starter, &server.url, "sku-1", &options, &script);
    end(running).await.is(7);
}

/// `timeout` starts a group of its own, and `setsid` starts a session of its own.
#[tokio::test]
async fn descendants_outside_the_group_are_stopped() {
    let (_db, server) = serving(&[]).await;
    for (options, then, status) in [
        (&["--ttl", "5m"][..], "exit 7", 7),
        (&["--ttl", "5m", "--max-time", "15s"], "sleep 1000", 123),
        (&["--ttl", "9s"], "sleep 1000", 124),
    ] {
        let notes = Notes::new();
        let script = notes.script(&format!(
            "(setsid sh -c 'trap \"\" TERM; echo $$ > NOTES/ignores; exec sleep 1000' > /dev/null 2>&1 &)\n\
             timeout 1000 sh -c 'trap \"echo TERM > NOTES/log; exit\" TERM; echo $$ > NOTES/ends; \
                                while :; do sleep 0.02; done' > /dev/null 2>&1 &\n\
             until test -s NOTES/ignores && test -s NOTES/ends; do sleep 0.02; done; \
             echo > NOTES/ready; {then}"
        ));
        let options = [options, &["--grace", "2s", "--wait", "20s"]].concat();
        let running = start(&server, &options, &script);
        notes.has("ready").await;
        if status == 124 {
            break_lease(&server).await;
        }
        end(running).await.is(status);
        for process in ["ignores", "ends"] {
            assert!(!lives(&notes.has(process).await), "{process}, {status}");
        }
        assert_eq!(notes.text("log"), "TERM\n", "{status}");
        assert!(!held(&server).await);
    }
}

/// A process that `tower-fence run` has inherited from the program that executed it.
#[tokio::test]
async fn processes_from_before_the_command_are_not_stopped() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let script = notes
        .script("setsid sleep 1000 > /dev/null 2>&1 & echo $! > NOTES/earlier; exec \"$0\" \"$@\"");
    let starter = ["env", "--default-signal", "sh", "-c", &script];
    let running = start_under(&starter, &server.url, "sku-1", &[], "exit 7");
    end(running).await.is(7);
    let earlier = notes.has("earlier").await;
    assert!(lives(&earlier));
    send_signal(earlier.parse().unwrap(), "-KILL");
}

#[tokio::test]
async fn a_stopped_command_ends_after_term() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let script = notes.script("echo $$ > NOTES/id; exec sleep 1000");
    let running = start(&server, &[], &script);
    let command = notes.has("id").await;
    send_signal(command.parse().unwrap(), "-STOP");
    running.signal("-TERM");
    end(running).await.is(143);
}

/// Starts a command that writes continuously and has a child outside its group. Stops it with TSTP,
/// which is sent to `tower-fence run`.
async fn stopped(server: &Served, notes: &Notes, ttl: &str) -> (Process, String) {
    let script = notes.script(
        "setsid sh -c 'echo $$ > NOTES/outside; exec sleep 1000' > /dev/null 2>&1 & \
         echo $$ > NOTES/command; while ! test -e NOTES/go; do echo x >> NOTES/log; sleep 0.02; done",
    );
    let running = start(server, &["--ttl", ttl, "--wait", "20s"], &script);
    let command = notes.has("command").await;
    let outside = notes.has("outside").await;
    running.signal("-TSTP");
    let keeper = running.id().to_string();
    eventually!("tower-fence run is stopped", state(&keeper) == Some('T'));
    // In state D, the signal was sent, and takes effect when the command has written to the disk.
    assert_matches!(state(&command), Some('T' | 'D'));
    assert_eq!(state(&outside), Some('T'));
    (running, command)
}

#[tokio::test]
async fn stopped_command_resumes_with_the_run_process() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let (running, command) = stopped(&server, &notes, "5m").await;
    running.signal("-CONT");
    eventually!("the command continues", state(&command) != Some('T'));
    let outside = notes.has("outside").await;
    eventually!("the child continues", state(&outside) != Some('T'));
    notes.note("go");
    end(running).await.is(0);
    assert!(!lives(&outside), "the child was left");
}

#[tokio::test]
async fn command_stopped_past_its_lease_writes_nothing_more() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let (running, _) = stopped(&server, &notes, "5s").await;
    let written = notes.text("log");
    expires(&server).await;
    running.signal("-CONT");
    end(running).await.is(124);
    assert_eq!(notes.text("log"), written);
    assert!(held(&server).await, "the other client has the lease");
}
