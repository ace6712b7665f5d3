//! `tower-fence run` with a terminal.

use std::time::Duration;

use reqwest::Method;
use serde_json::json;
use tokio::time::sleep;

use super::{
    command::{Notes, end, lives, serving, start_under, state},
    program::Served,
};
use crate::support::{
    eventually,
    http::Answer,
    process::{Process, send_signal},
};

/// Starts a command in a terminal. `shell` runs it in the foreground or elsewhere, and `tower-fence
/// run` writes its process id to `keeper`. USR1 to the returned process types Ctrl-C, and USR2
/// types Ctrl-Z.
fn with_terminal(server: &Served, notes: &Notes, shell: &[&str], script: &str) -> Process {
    with_options(server, notes, shell, &["--grace", "10s"], script)
}

fn with_options(
    server: &Served,
    notes: &Notes,
    shell: &[&str],
    options: &[&str],
    script: &str,
) -> Process {
    const TERMINAL: &str = "import os, pty, signal, sys\n\
        pid, terminal = pty.fork()\n\
        if pid == 0: os.execvp(sys.argv[1], sys.argv[1:])\n\
        signal.signal(signal.SIGUSR1, lambda *_: os.write(terminal, b'\\x03'))\n\
        signal.signal(signal.SIGUSR2, lambda *_: (os.write(terminal, b'\\x1a'), os.write(2, b'typed')))\n\
        try:\n    while os.read(terminal, 1000): pass\n\
        except OSError: pass\n\
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))";
    let python = ["env", "--default-signal", "python3", "-c", TERMINAL];
    let starter = [&python, shell].concat();
    let script = notes.script(&format!("echo $PPID > NOTES/keeper; {script}"));
    start_under(&starter, &server.url, "sku-1", options, &script)
}

/// A shell without job control, which does not execute the program in its own process.
const IN_FOREGROUND: [&str; 3] = ["sh", "-c", "\"$0\" \"$@\"; exit $?"];
const IN_BACKGROUND: [&str; 3] = ["bash", "-c", "set -m; \"$0\" \"$@\" & wait $!"];
/// A command that starts the program without a shell, as in a container.
const AS_LEADER: [&str; 2] = ["env", "--default-signal"];

fn noting_int(notes: &Notes) -> String {
    let traps = "trap 'echo INT >> NOTES/log' INT; trap 'exit 9' TERM";
    let waits = "echo ready > NOTES/ready; while :; do sleep 0.02; done";
    notes.script(&format!("{traps}; {waits}"))
}

#[tokio::test]
async fn signal_from_a_process_is_forwarded_in_the_foreground() {
    let (_db, server) = serving(&[]).await;
    for shell in [&IN_FOREGROUND[..], &AS_LEADER, &IN_BACKGROUND] {
        let notes = Notes::new();
        let running = with_terminal(&server, &notes, shell, &noting_int(&notes));
        notes.has("ready").await;
        let keeper = notes.text("keeper").trim().parse().unwrap();
        send_signal(keeper, "-INT");
        eventually!("the signal is forwarded", notes.text("log") == "INT\n");
        send_signal(keeper, "-TERM");
        end(running).await.is(9);
    }
}

#[tokio::test]
async fn terminal_signal_reaches_the_command_once() {
    let (_db, server) = serving(&[]).await;
    for shell in [&IN_FOREGROUND[..], &AS_LEADER] {
        let notes = Notes::new();
        let running = with_terminal(&server, &notes, shell, &noting_int(&notes));
        notes.has("ready").await;
        running.signal("-USR1");
        eventually!("the signal arrives", notes.text("log") == "INT\n");
        let keeper = notes.text("keeper").trim().parse().unwrap();
        send_signal(keeper, "-TERM");
        end(running).await;
        assert_eq!(notes.text("log"), "INT\n");
    }
}

/// The terminal sends the signal only to the command, which has the terminal. The program then does
/// not keep the lease for the rest of `--at-least`.
#[tokio::test]
async fn terminal_signal_ends_a_container() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    // A shell that starts a process when the signal arrives may lose the signal.
    let script = notes.script("echo > NOTES/ready; exec sleep 1000");
    let options = ["--at-least", "600s"];
    let running = with_options(&server, &notes, &AS_LEADER, &options, &script);
    notes.has("ready").await;
    running.signal("-USR1");
    end(running).await.is(130);
}

/// No shell could continue the stopped process.
#[tokio::test]
async fn terminal_signal_does_not_stop_a_container() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    // This command starts no processes. A shell that starts one with vfork does not stop while the
    // new process is stopped.
    let script = notes.script(
        "echo $$ > NOTES/command; exec python3 -c \"import os, sys, time\n\
         while not os.path.exists('NOTES/go'): time.sleep(0.02)\n\
         sys.exit(7)\"",
    );
    let running = with_terminal(&server, &notes, &AS_LEADER, &script);
    notes.has("command").await;
    running.signal("-USR2");
    eventually!("the key is typed", running.log().contains("typed"));
    notes.note("go");
    end(running).await.is(7);
}

#[tokio::test]
async fn terminal_signal_does_not_stop_a_container_that_waits() {
    let (db, server) = serving(&[]).await;
    let held = server.post("/locks/sku-1", &json!({})).await.json();
    let notes = Notes::new();
    let running = with_options(&server, &notes, &AS_LEADER, &["--wait", "1h"], "exit 7");
    eventually!("it waits", db.count("tower_fence.waiters").await == 1);
    running.signal("-USR2");
    eventually!("the key is typed", running.log().contains("typed"));
    let release = server.of_holder(Method::DELETE, &held);
    assert_eq!(Answer::to(release).await.status, 204);
    end(running).await.is(7);
}

/// If the command runs in a background job or in a container, no shell stops its processes.
#[tokio::test]
async fn background_job_of_a_shell_is_stopped_with_its_group() {
    let (_db, server) = serving(&[]).await;
    for shell in [&IN_BACKGROUND[..], &AS_LEADER] {
        let notes = Notes::new();
        let script = notes.script("sleep 1000 > /dev/null 2>&1 & echo $! > NOTES/child");
        let running = with_terminal(&server, &notes, shell, &script);
        let child = notes.has("child").await;
        end(running).await.is(0);
        assert!(!lives(&child), "{shell:?}");
    }
}

/// The system stops a process that reads from the terminal in the background.
#[tokio::test]
async fn command_that_the_terminal_has_stopped_is_reported_once() {
    let (_db, server) = serving(&[]).await;
    let notes = Notes::new();
    let shell = notes.script("\"$0\" \"$@\" </dev/null 2>NOTES/errors; exit $?");
    let script = notes.script("echo $$ > NOTES/command; read -r line </dev/tty");
    let running = with_terminal(&server, &notes, &["sh", "-c", &shell], &script);
    let command = notes.has("command").await;
    let reported = "the command is stopped, because it uses the terminal in the background";
    let reports = || notes.text("errors").matches(reported).count();
    eventually!("the stop is reported", reports() > 0);
    // The command continues, and is stopped again.
    for _ in 0..2 {
        send_signal(command.parse().unwrap(), "-CONT");
        eventually!("the command is stopped", state(&command) == Some('T'));
        // The program checks the state of the command at least every 200 ms.
        sleep(Duration::from_millis(400)).await;
    }
    let keeper = notes.text("keeper").trim().parse().unwrap();
    send_signal(keeper, "-TERM");
    end(running).await.is(143);
    assert_eq!(reports(), 1);
}
