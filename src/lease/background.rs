//! Clean-up that runs after a request is dropped.

use tokio::runtime::Handle;

/// Spawner of clean-up tasks. It uses the runtime in which the request is dropped or, outside of
/// any runtime, the runtime in which this value was created. If that runtime has shut down, the
/// clean-up does not run, and the lease or the queue position expires.
#[derive(Debug)]
pub(super) struct Background(Option<Handle>);

impl Background {
    /// Captures the current runtime for a new request.
    pub(super) fn here() -> Self {
        Self(Handle::try_current().ok())
    }

    pub(super) fn spawn<F>(&self, task: F)
    where
        F: Future<Output: Send> + Send + 'static,
    {
        if let Some(runtime) = Handle::try_current().ok().as_ref().or(self.0.as_ref()) {
            runtime.spawn(task);
        }
    }
}
