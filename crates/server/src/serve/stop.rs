//! The signal to stop, and what follows it.
//!
//! 1. The signal comes: `/readyz` answers 503, and answers carry `Connection: close`. Requests are served as before.
//! 2. After `--drain-delay`, the server closes: it accepts no connection, and what it has accepted is answered.
//! 3. The second signal ends the process at once.

use std::time::Duration;

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::sleep,
};

use crate::failure::Failure;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Running,
    Stopping,
    Closing,
}

/// Tells that the server stops. Cheap to clone.
#[derive(Clone)]
pub struct Stop(watch::Receiver<Stage>);

impl Stop {
    /// Begins with the first SIGTERM or SIGINT; the server closes after this delay.
    pub fn on_signals(delay: Duration) -> Result<Self, Failure> {
        let failed = |error| Failure::unavailable("no signals", &error);
        let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
        let (stages, stage) = watch::channel(Stage::Running);
        tokio::spawn(async move {
            let mut next = async || {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
            };
            next().await;
            tracing::info!(?delay, "stopping: requests under way finish first");
            stages.send_replace(Stage::Stopping);
            let closing = async {
                sleep(delay).await;
                stages.send_replace(Stage::Closing);
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = next() => {}
                () = closing => {}
            }
            tracing::warn!("stopped at once, by a second signal");
            std::process::exit(1);
        });
        Ok(Self(stage))
    }

    pub fn has_begun(&self) -> bool {
        *self.0.borrow() >= Stage::Stopping
    }

    /// Waits for the signal.
    pub async fn begun(&self) {
        self.reaches(Stage::Stopping).await;
    }

    /// Waits until no further connection is accepted.
    pub async fn closing(&self) {
        self.reaches(Stage::Closing).await;
    }

    async fn reaches(&self, stage: Stage) {
        let mut now = self.0.clone();
        // Without its sender, the runtime ends.
        if now.wait_for(|now| *now >= stage).await.is_err() {
            std::future::pending().await
        }
    }
}
