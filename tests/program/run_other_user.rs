//! Processes of another user that a command of `tower-fence run` has started, and that `run` has no
//! right to signal. Only root can start them.

use super::{
    command::{Notes, break_lease, end, held, lives, serving, start_under},
    program::Served,
};
use crate::support::{
    eventually,
    process::{Process, send_signal},
};

/// A command that starts `tower-fence run` without the right to signal processes of another user,
/// like an ordinary user.
const WITHOUT_RIGHTS: [&str; 4] = ["env", "--default-signal", "setpriv", "--bounding-set=-kill"];

/// The process of another user is in the group of the command, or has left it.
const PLACES: [&str; 2] = ["", "setsid "];

/// Starts a command that leaves a process of another user in a place, and then ends or waits.
async fn beside_another_user(
    server: &Served,
    notes: &Notes,
    place: &str,
    then: &str,
) -> (Process, String) {
    let script = notes.script(&format!(
        "{place}setpriv --reuid=65534 --clear-groups sleep 1000 > /dev/null 2>&1 & \
         until grep -q '^Uid:.65534' /proc/$!/status; do sleep 0.02; done; \
         echo $! > NOTES/child; {then}"
    ));
    let options = ["--ttl", "5s", "--wait", "20s", "--grace", "100ms"];
    let running = start_under(&WITHOUT_RIGHTS, &server.url, "sku-1", &options, &script);
    let child = notes.has("child").await;
    (running, child)
}

#[tokio::test]
async fn lease_is_kept_while_a_process_cannot_be_stopped() {
    let (_db, server) = serving(&[]).await;
    for place in PLACES {
        let notes = Notes::new();
        let (running, child) = beside_another_user(&server, &notes, place, "exit 7").await;
        let named = format!("pid {child} (sleep, user nobody)");
        eventually!("the command is named", running.log().contains(&named));
        assert!(lives(&child) && held(&server).await);
        send_signal(child.parse().unwrap(), "-KILL");
        end(running).await.is(7);
        assert!(!held(&server).await);
    }
}

#[tokio::test]
async fn command_running_without_its_lease_is_reported() {
    let (_db, server) = serving(&[]).await;
    for place in PLACES {
        let notes = Notes::new();
        let (running, child) = beside_another_user(&server, &notes, place, "sleep 1000").await;
        break_lease(&server).await;
        let ended = end(running).await;
        ended.is(125).says("could not be stopped");
        ended.says(&format!("pid {child} (sleep, user nobody)"));
        assert!(lives(&child));
        send_signal(child.parse().unwrap(), "-KILL");
    }
}
