//! The signals that `run` handles. If a signal was ignored when the program started, as under
//! `nohup`, the program and the command ignore it, too.

use std::{fs, thread};

use rustix::process::{Signal, getpid, getsid, kill_process};
use signal_hook::iterator::{SignalsInfo, exfiltrator::WithOrigin};
use tokio::sync::mpsc::{self, UnboundedReceiver};

use crate::failure::Failure;

/// The signals that are forwarded, and TSTP, which suspends the command and then this process.
const HANDLED: [Signal; 7] = [
    Signal::TERM,
    Signal::INT,
    Signal::HUP,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
    Signal::TSTP,
];

/// A signal that has arrived.
#[derive(Clone, Copy)]
pub struct Heard {
    pub signal: Signal,
    /// Whether the kernel sent the signal, as the terminal does for Ctrl-C. Each process in the
    /// foreground of the terminal has then received the signal.
    pub by_terminal: bool,
}

impl Heard {
    /// Returns whether the signal asks this process to end.
    pub fn is_interrupt(self) -> bool {
        matches!(
            self.signal,
            Signal::TERM | Signal::INT | Signal::HUP | Signal::QUIT
        )
    }
}

/// The signals to this process from now on, including CHILD.
pub struct Signals(UnboundedReceiver<Heard>);

impl Signals {
    pub fn new() -> Result<Self, Failure> {
        let ignored = ignored();
        let is_heeded = |signal: &Signal| ignored & (1 << (signal.as_raw() - 1)) == 0;
        let handled: Vec<Signal> = HANDLED
            .into_iter()
            .filter(is_heeded)
            .chain([Signal::CHILD])
            .collect();
        let numbers = handled.iter().map(|signal| signal.as_raw());
        let mut arriving = SignalsInfo::<WithOrigin>::new(numbers)
            .map_err(|error| Failure::unavailable("cannot handle signals", &error))?;
        let (sender, receiver) = mpsc::unbounded_channel();
        // The thread ends with the process.
        thread::spawn(move || {
            for origin in arriving.forever() {
                let is_this = |signal: &&Signal| signal.as_raw() == origin.signal;
                let Some(signal) = handled.iter().find(is_this) else {
                    continue;
                };
                let by_terminal = origin.process.is_none();
                // No shell could continue the leader of a session, such as the first process of a
                // container.
                if by_terminal && *signal == Signal::TSTP && getsid(None) == Ok(getpid()) {
                    continue;
                }
                let heard = Heard {
                    signal: *signal,
                    by_terminal,
                };
                if sender.send(heard).is_err() {
                    return;
                }
            }
        });
        Ok(Self(receiver))
    }

    /// Waits for the next signal.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, no signal is lost.
    pub async fn next(&mut self) -> Heard {
        match self.0.recv().await {
            Some(heard) => heard,
            None => std::future::pending().await,
        }
    }

    /// Waits for a signal that asks this process to end. Discards other signals, except for TSTP,
    /// which suspends this process.
    pub async fn interrupt(&mut self) -> Signal {
        loop {
            let heard = self.next().await;
            match heard.signal {
                Signal::TSTP => stop_this_process(),
                signal if heard.is_interrupt() => return signal,
                _ => {}
            }
        }
    }

    /// Discards the signals that have arrived.
    pub fn clear(&mut self) {
        while self.0.try_recv().is_ok() {}
    }
}

/// Suspends this process until another process sends CONT.
pub fn stop_this_process() {
    _ = kill_process(getpid(), Signal::STOP);
}

/// Returns the ignored signals as a bit mask; 0 if the system does not report them.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or_default()
}
