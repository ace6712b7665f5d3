//! What a request leaves to be done when it is dropped.

use tokio::runtime::Handle;

/// Where that runs: in the runtime in which the request is dropped, or, outside of any, in the one in which this was
/// made. Where that has ended nothing runs, and what was to be given back ends by its time.
#[derive(Debug)]
pub(super) struct Background(Option<Handle>);

impl Background {
    /// Of a request that begins here.
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
