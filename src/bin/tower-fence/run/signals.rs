//! The signals that are passed on.

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

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
pub struct Signals([tokio::signal::unix::Signal; 6]);

impl Signals {
    pub fn new() -> Result<Self, Failure> {
        let [term, int, hup, quit, usr1, usr2] =
            PASSED_ON.map(|passed| signal(SignalKind::from_raw(passed.as_raw())));
        let all = || Ok([term?, int?, hup?, quit?, usr1?, usr2?]);
        let all = all().map_err(|error: std::io::Error| Failure::unavailable("no signals", &error));
        all.map(Self)
    }

    /// Waits for the next one.
    pub async fn next(&mut self) -> Signal {
        let [term, int, hup, quit, usr1, usr2] = &mut self.0;
        tokio::select! {
            _ = term.recv() => Signal::TERM,
            _ = int.recv() => Signal::INT,
            _ = hup.recv() => Signal::HUP,
            _ = quit.recv() => Signal::QUIT,
            _ = usr1.recv() => Signal::USR1,
            _ = usr2.recv() => Signal::USR2,
        }
    }
}
