//! The signals that are passed on. Those that were ignored when the program began, as `nohup` has it, stay ignored, by
//! the command as well.

use std::{fs, future::poll_fn, task::Poll};

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind, signal};

use crate::failure::Failure;

const PASSED_ON: [Signal; 6] = [
    Signal::TERM,
    Signal::INT,
    Signal::HUP,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
];

/// Signals to this process, from now on.
pub struct Signals(Vec<(Signal, unix::Signal)>);

impl Signals {
    pub fn new() -> Result<Self, Failure> {
        let ignored = ignored();
        let heard = PASSED_ON.into_iter().filter(|passed| {
            let bit = 1 << (passed.as_raw() - 1);
            ignored & bit == 0
        });
        let listen = |passed: Signal| {
            let heard = signal(SignalKind::from_raw(passed.as_raw()))?;
            Ok((passed, heard))
        };
        let all: std::io::Result<_> = heard.map(listen).collect();
        let all = all.map_err(|error| Failure::unavailable("no signals", &error))?;
        Ok(Self(all))
    }

    /// Waits for the next one.
    pub async fn next(&mut self) -> Signal {
        poll_fn(|cx| {
            for (passed, heard) in &mut self.0 {
                if heard.poll_recv(cx).is_ready() {
                    return Poll::Ready(*passed);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// The signals that are ignored, a bit for each; none where the system does not tell.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or_default()
}
