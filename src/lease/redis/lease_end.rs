//! The task that looks whether a lease has ended, one for each resource that has waiters.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{
    answer::Answer,
    waiters::{LONGEST_SLEEP, Waiters},
};
use crate::token::Resource;

/// The task that looks when the lease that is in the way has ended, until no waiter is left. Where it ends before that,
/// with its runtime, every waiter asks again, and begins another.
pub(super) struct LeaseEnd {
    ends: watch::Receiver<Instant>,
    // Told behind that: where the line has no receiver, it is known that nobody looks.
    line: WatchedLine,
}

struct WatchedLine {
    waiters: Weak<Waiters>,
    resource: Resource,
}

impl Drop for WatchedLine {
    fn drop(&mut self) {
        if let Some(waiters) = self.waiters.upgrade() {
            waiters.wake_line(&waiters.scripts().lease_key(&self.resource));
        }
    }
}

impl LeaseEnd {
    pub(super) fn new(
        waiters: &Arc<Waiters>,
        resource: &Resource,
        ends: watch::Receiver<Instant>,
    ) -> Self {
        let (waiters, resource) = (Arc::downgrade(waiters), resource.clone());
        let line = WatchedLine { waiters, resource };
        Self { ends, line }
    }

    pub(super) async fn watch(mut self) {
        let Self { ends, line } = &mut self;
        let resource = &line.resource;
        loop {
            let end = *ends.borrow_and_update();
            tokio::select! {
                biased;
                changed = ends.changed() => match changed {
                    Ok(()) => continue,
                    // The line is gone, and with it the last waiter.
                    Err(_) => return,
                },
                // Redis counts whole milliseconds.
                () = sleep_until(end + Duration::from_millis(1)) => {}
            }
            let Some(waiters) = line.waiters.upgrade() else {
                return;
            };
            let scripts = waiters.scripts();
            let key = scripts.lease_key(resource);
            let some_waiter = {
                let lines = waiters.lines();
                let ids = lines.get(&*key).and_then(|line| line.waiters.keys().next());
                ids.cloned()
            };
            let next_look = match scripts.tick(resource, some_waiter.as_ref()).await {
                Ok(Answer::Watched { left, in_line }) => {
                    if !in_line {
                        // The waiter was passed over, or the line was lost.
                        waiters.wake_line(&key);
                    }
                    left
                }
                Ok(_) => {
                    waiters.wake_line(&key);
                    scripts.server().command_wait()
                }
                Err(_) => scripts.server().command_wait(),
            };
            let lines = waiters.lines();
            // What was published meanwhile is newer than this answer.
            if let Some(line) = lines.get(&*key)
                && !ends.has_changed().unwrap_or(true)
            {
                // A key without an end is none of this crate's; to look at it all the time does not help.
                let next_look = next_look.clamp(Duration::from_millis(20), LONGEST_SLEEP);
                line.ends.send_replace(Instant::now() + next_look);
            }
        }
    }
}
