//! Task that receives notifications. Each store has one such task, from the first waiting request
//! until the store is dropped.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::{Store, Turns};
use crate::{
    lease::{Backend, LeaseError},
    sampler::Sampler,
};

/// Time for which a request waits until its process receives notifications. After that, the request
/// polls.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause after a connection was lost.
const SHORT_PAUSE: Duration = Duration::from_millis(10);
/// Pause after the first failed connection attempt. It doubles after each further failure, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Pause after a configuration error, and after many failed connection attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Whether this process receives notifications: the number under which the store sends them, or the
/// error of the last attempt to connect. `None` before the first attempt ends, and between
/// attempts.
pub(super) type Listening = Option<Result<i64, LeaseError>>;

/// Handle of the task that receives notifications. The task is aborted when the handle is dropped.
pub(super) struct Listener {
    turns: Turns,
    task: Mutex<Option<AbortHandle>>,
    /// Limits the log lines about missing notifications.
    pub(super) failures: Sampler,
}

impl Listener {
    pub(super) fn new(turns: Turns) -> Self {
        Self {
            turns,
            task: Mutex::default(),
            failures: Sampler::new(),
        }
    }

    /// Makes sure that this process receives notifications. Returns the number under which the
    /// store sends them.
    pub(super) async fn listen<B: Backend>(
        &self,
        store: &Arc<Store<B>>,
    ) -> Result<i64, LeaseError> {
        let mut state = self.turns.0.listening.subscribe();
        self.begin(store);
        self.turns.0.wanted.notify_one();
        let listening = timeout(LISTEN_TIMEOUT, state.wait_for(Option::is_some)).await;
        let listening = listening.ok().and_then(Result::ok);
        let listening = listening.and_then(|listening| listening.clone());
        listening.unwrap_or_else(|| Err(LeaseError::unavailable(NotListening)))
    }

    /// Starts the task unless it is running.
    fn begin<B: Backend>(&self, store: &Arc<Store<B>>) {
        // No code panics while it holds the lock.
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(AbortHandle::is_finished) {
            let receiving = receive(Arc::clone(store), self.turns.clone());
            *task = Some(tokio::spawn(receiving).abort_handle());
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

/// Receives notifications. Opens a connection when a request is about to wait, and opens another
/// one for a later request if the connection was lost or could not be opened.
async fn receive<B: Backend>(store: Arc<Store<B>>, turns: Turns) {
    let state = &turns.0.listening;
    let mut pause = FIRST_PAUSE;
    loop {
        turns.0.wanted.notified().await;
        let listened = store.backend.listen(&turns).await;
        if matches!(&*state.borrow(), Some(Ok(_))) {
            state.send_replace(None);
            // Each request retries.
            turns.call_all();
            sleep(SHORT_PAUSE).await;
            pause = FIRST_PAUSE;
            continue;
        }
        if let Err(error) = listened {
            if matches!(error, LeaseError::Misconfigured(_)) {
                pause = LONGEST_PAUSE;
            }
            state.send_replace(Some(Err(error)));
        }
        sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
        state.send_replace(None);
    }
}

/// Error for notifications that did not arrive before the timeout.
#[derive(Debug, thiserror::Error)]
#[error("this process does not receive notifications from the lease store yet")]
struct NotListening;
