//! The stages of a shutdown.
//!
//! 1. After the first signal, `/readyz` answers 503, and each response has `Connection: close`.
//!    Requests are still served.
//! 2. After `--drain-delay`, the server closes. It accepts no new connections, and finishes the
//!    requests of accepted ones.
//! 3. A second signal ends the process immediately.

use std::time::Duration;

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::sleep,
};

use crate::{failure::Failure, logs};

/// How long a request may stay in the queue after the server has closed.
const QUEUE_GRACE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Running,
    Stopping,
    Closing,
}

/// A handle that reports the stage of the shutdown. The handle is cheap to clone.
#[derive(Clone)]
pub struct Stop(watch::Receiver<Stage>);

impl Stop {
    /// Installs the handlers of SIGTERM and SIGINT. The server closes when `delay` has passed after
    /// the first signal.
    pub fn on_signals(delay: Duration) -> Result<Self, Failure> {
        let failed = |error| Failure::unavailable("cannot handle signals", &error);
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
            stages.send_replace(Stage::Stopping);
            tracing::info!(?delay, "stopping: requests in progress finish first");
            let closing = async {
                sleep(delay).await;
                stages.send_replace(Stage::Closing);
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = next() => {}
                () = closing => {}
            }
            tracing::warn!("stopped immediately by a second signal");
            logs::flush();
            std::process::exit(1);
        });
        Ok(Self(stage))
    }

    /// A handle of a server that never stops.
    pub fn never() -> Self {
        Self(watch::channel(Stage::Running).1)
    }

    pub fn has_begun(&self) -> bool {
        *self.0.borrow() >= Stage::Stopping
    }

    /// Waits for the first signal.
    pub async fn begun(&self) {
        self.reaches(Stage::Stopping).await;
    }

    /// Waits until the server closes.
    pub async fn closing(&self) {
        self.reaches(Stage::Closing).await;
    }

    /// Waits until requests must leave the queue.
    pub async fn queue_over(self) {
        self.closing().await;
        sleep(QUEUE_GRACE).await;
    }

    async fn reaches(&self, stage: Stage) {
        let mut now = self.0.clone();
        // Only `never` and the end of the runtime drop the sender.
        if now.wait_for(|now| *now >= stage).await.is_err() {
            std::future::pending().await
        }
    }
}
