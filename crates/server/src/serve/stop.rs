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
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use crate::{failure::Failure, logs};

/// How long a request may stay in the queue after the server has closed.
const QUEUE_GRACE: Duration = Duration::from_secs(1);

/// A handle that reports the stage of the shutdown. The handle is cheap to clone. The default
/// handle is that of a server that never stops.
#[derive(Clone, Default)]
pub struct Stop {
    begun: CancellationToken,
    closing: CancellationToken,
}

impl Stop {
    /// Installs the handlers of SIGTERM and SIGINT. The server closes when `delay` has passed after
    /// the first signal.
    pub fn on_signals(delay: Duration) -> Result<Self, Failure> {
        let failed = |error| Failure::unavailable("cannot handle signals", &error);
        let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
        let stop = Self::default();
        let Self { begun, closing } = stop.clone();
        tokio::spawn(async move {
            let mut next = async || {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
            };
            next().await;
            begun.cancel();
            tracing::info!(?delay, "stopping: requests in progress finish first");
            let close = async {
                sleep(delay).await;
                closing.cancel();
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = next() => {}
                () = close => {}
            }
            tracing::warn!("stopped immediately by a second signal");
            logs::flush();
            std::process::exit(1);
        });
        Ok(stop)
    }

    pub fn has_begun(&self) -> bool {
        self.begun.is_cancelled()
    }

    /// Waits for the first signal.
    pub async fn begun(&self) {
        self.begun.cancelled().await;
    }

    /// Waits until the server closes.
    pub async fn closing(&self) {
        self.closing.cancelled().await;
    }

    /// Waits until requests must leave the queue.
    pub async fn queue_over(self) {
        self.closing().await;
        sleep(QUEUE_GRACE).await;
    }
}
