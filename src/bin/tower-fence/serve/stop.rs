//! The signal to stop.

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use crate::failure::Failure;

/// Tells that the server stops. Cheap to clone.
#[derive(Clone)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    /// Begins with the first SIGTERM or SIGINT. The second one ends the process at once.
    pub fn on_signals() -> Result<Self, Failure> {
        let failed = |error| Failure::unavailable("no signals", &error);
        let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
        let (begins, begun) = watch::channel(false);
        tokio::spawn(async move {
            for end in [false, true] {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                if end {
                    tracing::warn!("stopped at once, by a second signal");
                    std::process::exit(1);
                }
                begins.send_replace(true);
                tracing::info!("stopping: requests under way finish first");
            }
        });
        Ok(Self(begun))
    }

    pub fn has_begun(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits for it.
    pub async fn begun(&self) {
        let mut begun = self.0.clone();
        // Without its sender nobody will ever stop.
        if begun.wait_for(|begun| *begun).await.is_err() {
            std::future::pending().await
        }
    }
}
