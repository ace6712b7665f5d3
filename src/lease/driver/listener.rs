//! The task that hears of turns: one for a store, from the first request that waits until the store is dropped.

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

/// How long a request waits for its process to hear of turns, before it polls meanwhile.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause after a connection that was lost.
const SHORT_PAUSE: Duration = Duration::from_millis(10);
/// The pause after one that could not be made.
const LONG_PAUSE: Duration = Duration::from_millis(100);

/// What a backend passes on to the requests that wait at this process.
#[derive(Clone)]
pub struct Turns {
    queue: Arc<Queue>,
    state: Arc<watch::Sender<Hears>>,
    /// Told when a request is about to wait.
    wanted: Arc<Notify>,
}

/// Whether this process hears of turns.
#[derive(Clone)]
enum Hears {
    NotYet,
    /// Under this name.
    As(Arc<str>),
    /// The last attempt has failed.
    Failed(LeaseError),
}

impl Turns {
    /// Notes that this process hears of turns from now on, and that the store reaches it under this name.
    pub fn ready(&self, listener: impl AsRef<str>) {
        self.state.send_replace(Hears::As(listener.as_ref().into()));
    }

    /// Has the request with this [ticket](crate::lease::backend::Ask::ticket) ask: it is its turn.
    pub fn call(&self, ticket: i64) {
        self.queue.call(ticket);
    }

    /// Notes that the resource of the request with this ticket stays blocked for so long, if nothing happens.
    pub fn call_in(&self, ticket: i64, left: Duration) {
        self.queue.call_in(ticket, left);
    }

    /// Notes that a resource stays blocked for so long, if nothing happens. When that is over, one request of this
    /// process asks.
    pub fn blocked(&self, resource: &Resource, left: Duration) {
        self.queue.blocked(resource, left);
    }

    /// Has all requests for a resource ask: their positions may be lost.
    pub fn call_all_for(&self, resource: &Resource) {
        self.queue.call_line(resource);
    }

    /// Has all requests ask.
    pub fn call_all(&self) {
        self.queue.call_all();
    }

    /// The resources that requests of this process wait for.
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

/// The task, which ends when this is dropped.
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

    /// Makes sure that this process hears of turns. Returns the name under which it does.
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

    /// Begins the task, unless it runs.
    fn begin<B: Backend>(&self, backend: &Arc<B>) {
        // Nothing panics while the lock is held.
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
        // Without a request that waits there is no connection.
        turns.wanted.notified().await;
        let heard = backend.listen(&turns).await;
        let was_ready = matches!(&*turns.state.borrow(), Hears::As(_));
        let next = match heard {
            Err(error) if !was_ready => {
                tracing::warn!(error = %Chain(&error), "cannot hear of the turns of waiting requests");
                Hears::Failed(error)
            }
            _ => Hears::NotYet,
        };
        turns.state.send_replace(next);
        if was_ready {
            // Each request asks: for its position, its grant, or an error.
            turns.queue.call_all();
            sleep(SHORT_PAUSE).await;
        } else {
            sleep(LONG_PAUSE).await;
            turns.state.send_replace(Hears::NotYet);
        }
    }
}

/// The store cannot be heard in time.
#[derive(Debug, thiserror::Error)]
#[error("this process does not hear of the turns of waiting requests yet")]
struct NotHeard;
