//! Task that receives notifications. Each store has one such task, from the first waiting request
//! until the store is dropped.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Notify, watch},
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::queue::Queue;
use crate::{
    chain::Chain,
    lease::{Backend, LeaseError},
    token::Resource,
};

/// Time for which a request waits until its process receives notifications. After that, the request
/// polls.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause after a connection was lost.
const SHORT_PAUSE: Duration = Duration::from_millis(10);
/// Pause after a failed connection attempt.
const LONG_PAUSE: Duration = Duration::from_millis(100);
/// Pause after an error of configuration.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Handle with which a backend passes notifications on to the waiting requests of this process.
#[derive(Clone)]
pub struct Turns {
    queue: Arc<Queue>,
    state: Arc<watch::Sender<Hears>>,
    /// Notified when a request is about to wait.
    wanted: Arc<Notify>,
}

/// Whether this process receives notifications.
#[derive(Clone)]
enum Hears {
    NotYet,
    /// The store notifies this process under this name.
    As(Arc<str>),
    /// The last attempt to connect failed.
    Failed(LeaseError),
}

impl Turns {
    /// Records that this process now receives notifications. `listener` is the name under which the
    /// store notifies this process.
    pub fn ready(&self, listener: impl AsRef<str>) {
        self.state.send_replace(Hears::As(listener.as_ref().into()));
    }

    /// Makes the request with this [ticket](crate::lease::backend::Ask::ticket) retry, because it
    /// is the request's turn.
    pub fn call(&self, ticket: i64) {
        self.queue.call(ticket);
    }

    /// Records how long the resource of the request with this ticket stays blocked, unless the
    /// lease is released or renewed.
    pub fn call_in(&self, ticket: i64, left: Duration) {
        self.queue.call_in(ticket, left);
    }

    /// Records how long a resource stays blocked, unless the lease is released or renewed. After
    /// that time, one request of this process retries.
    pub fn blocked(&self, resource: &Resource, left: Duration) {
        self.queue.blocked(resource, left);
    }

    /// Makes all requests for a resource retry, because the store may have lost their positions.
    pub fn call_all_for(&self, resource: &Resource) {
        self.queue.call_waiters(resource);
    }

    /// Makes all requests retry.
    pub fn call_all(&self) {
        self.queue.call_all();
    }

    /// Returns the resources that requests of this process wait for.
    #[must_use]
    pub fn resources(&self) -> Vec<Resource> {
        self.queue.resources()
    }
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turns").finish_non_exhaustive()
    }
}

/// Handle of the task that receives notifications. The task is aborted when the handle is dropped.
pub(super) struct Listener {
    turns: Turns,
    task: Mutex<Option<AbortHandle>>,
}

impl Listener {
    pub(super) fn new(queue: &Arc<Queue>) -> Self {
        let state = Arc::new(watch::Sender::new(Hears::NotYet));
        Self {
            turns: Turns {
                queue: Arc::clone(queue),
                state,
                wanted: Arc::default(),
            },
            task: Mutex::default(),
        }
    }

    /// Makes sure that this process receives notifications. Returns the name under which the store
    /// sends them.
    pub(super) async fn listen<B: Backend>(
        &self,
        backend: &Arc<B>,
    ) -> Result<Arc<str>, LeaseError> {
        let mut state = self.turns.state.subscribe();
        self.begin(backend);
        self.turns.wanted.notify_one();
        let hears = state.wait_for(|state| !matches!(state, Hears::NotYet));
        match timeout(LISTEN_TIMEOUT, hears).await {
            Ok(Ok(state)) => match &*state {
                Hears::As(name) => Ok(Arc::clone(name)),
                Hears::Failed(error) => Err(error.clone()),
                Hears::NotYet => Err(LeaseError::unavailable(NotHeard)),
            },
            _ => Err(LeaseError::unavailable(NotHeard)),
        }
    }

    /// Starts the task unless it is running.
    fn begin<B: Backend>(&self, backend: &Arc<B>) {
        // No code panics while the lock is held.
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(AbortHandle::is_finished) {
            let hearing = hear(Arc::clone(backend), self.turns.clone());
            *task = Some(tokio::spawn(hearing).abort_handle());
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = task.take() {
            task.abort();
        }
    }
}

async fn hear<B: Backend>(backend: Arc<B>, turns: Turns) {
    loop {
        // The connection is opened only when a request waits.
        turns.wanted.notified().await;
        let listened = backend.listen(&turns).await;
        if matches!(&*turns.state.borrow(), Hears::As(_)) {
            turns.state.send_replace(Hears::NotYet);
            // Each request retries and receives its position, its grant, or an error.
            turns.queue.call_all();
            sleep(SHORT_PAUSE).await;
            continue;
        }
        let mut pause = LONG_PAUSE;
        if let Err(error) = listened {
            tracing::warn!(error = %Chain(&error), "cannot receive notifications of the lease store; waiting requests poll instead");
            if matches!(error, LeaseError::Misconfigured(_)) {
                pause = LONGEST_PAUSE;
            }
            turns.state.send_replace(Hears::Failed(error));
        }
        sleep(pause).await;
        turns.state.send_replace(Hears::NotYet);
    }
}

/// Error for notifications that did not arrive before the timeout.
#[derive(Debug, thiserror::Error)]
#[error("this process does not receive notifications of the lease store yet")]
struct NotHeard;
