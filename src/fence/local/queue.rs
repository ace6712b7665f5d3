//! Queues of one process: one for each resource that is written to, and one for each idempotency
//! key.
//!
//! The row lock alone would serialize the writes, but a write that waits for the row lock holds a
//! connection of the pool. The writes to one contended resource would then hold all connections,
//! and starve the writes to other resources. Therefore writes wait here first, and only the first
//! write in a queue takes a connection.
//!
//! SQLite allows one writer at a time, and does not serve waiting writers in order. On SQLite, the
//! first writes of all queues therefore wait in one more queue.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

use crate::token::Resource;

/// Purpose of a queue.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(in crate::fence) enum QueueKey {
    Resource(Resource),
    /// All transactions that write, on a database that allows one writer at a time.
    Writer,
    /// An idempotency key, with the digest of its scope.
    Key([u8; 32], String),
    /// The task that moves the resources of a distributed fence to the current timeline.
    CatchUp,
    /// Calls to an SQL function for a resource whose rows are locked, and whether they assign a
    /// token.
    #[cfg(feature = "postgres")]
    Call(&'static str, bool, Resource),
}

/// Queues of all keys for which a permit is held or awaited. Each queue is in the order of arrival.
#[derive(Default)]
pub(in crate::fence) struct Queues {
    queues: Mutex<HashMap<QueueKey, Queue>>,
}

/// Queue of one key, while a request has its permit.
pub(crate) struct Queue {
    /// The requests that wait for the permit.
    waiters: VecDeque<oneshot::Sender<Permit>>,
    /// Whether requests are blocked. A request that joins sets this value, and a request that was
    /// not blocked at its turn clears it. Only calls to SQL functions use this value.
    is_blocked: bool,
}

/// Permission for the first request in a queue to take a connection. When this value is dropped,
/// the next request becomes the first.
pub(crate) struct Permit {
    queues: Arc<Queues>,
    /// The key of the queue, or `None` if the permit has been passed on.
    key: Option<QueueKey>,
}

impl Queues {
    /// Waits for the first position in the queue. Returns `None` on a timeout.
    ///
    /// If the future is dropped while it waits, the waiter leaves the queue.
    pub(in crate::fence) async fn wait(
        self: &Arc<Self>,
        key: QueueKey,
        until: Instant,
    ) -> Option<Permit> {
        let turn = match self.lock().entry(key) {
            Entry::Vacant(vacant) => {
                let permit = Permit::new(self, vacant.key());
                vacant.insert(Queue {
                    waiters: VecDeque::new(),
                    is_blocked: true,
                });
                return Some(permit);
            }
            Entry::Occupied(mut occupied) => {
                let queue = occupied.get_mut();
                queue.is_blocked = true;
                queue.remove_closed();
                let (waiter, turn) = oneshot::channel();
                queue.waiters.push_back(waiter);
                turn
            }
        };
        timeout_at(until, turn).await.ok()?.ok()
    }

    /// Returns whether the requests of this queue are blocked.
    #[cfg(feature = "postgres")]
    pub(in crate::fence) fn is_blocked(&self, key: &QueueKey) -> bool {
        self.lock().get(key).is_some_and(|queue| queue.is_blocked)
    }

    /// Records that a request of this queue was not blocked.
    #[cfg(feature = "postgres")]
    pub(in crate::fence) fn unblock(&self, key: &QueueKey) {
        if let Some(queue) = self.lock().get_mut(key) {
            queue.is_blocked = false;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<QueueKey, Queue>> {
        // No code panics while it holds the lock.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// Removes the waiters at the front that have left.
    fn remove_closed(&mut self) {
        let waiters = &mut self.waiters;
        while waiters.pop_front_if(|waiter| waiter.is_closed()).is_some() {}
    }

    /// Removes the first waiter that has not left.
    fn take_first(&mut self) -> Option<oneshot::Sender<Permit>> {
        self.remove_closed();
        self.waiters.pop_front()
    }
}

impl Permit {
    fn new(queues: &Arc<Queues>, key: &QueueKey) -> Self {
        Self {
            queues: Arc::clone(queues),
            key: Some(key.clone()),
        }
    }
}

/// Passes the permit to the first waiter that has not left. If there is none, removes the queue.
impl Drop for Permit {
    fn drop(&mut self) {
        while let Some(key) = self.key.take() {
            let mut queues = self.queues.lock();
            let Entry::Occupied(mut queue) = queues.entry(key) else {
                return;
            };
            let first = queue.get_mut().take_first();
            let Some(waiter) = first else {
                queue.remove();
                return;
            };
            let next = Self::new(&self.queues, queue.key());
            // Release the lock first, because `send` wakes the waiter.
            drop(queues);
            if let Err(mut unsent) = waiter.send(next) {
                self.key = unsent.key.take();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    #[tokio::test]
    async fn queue_admits_one_request_and_leaves_nothing_behind() {
        let queues = Arc::<Queues>::default();
        let [a, b] = ["a", "b"].map(|name| QueueKey::Resource(Resource::new(name).unwrap()));
        let first = queues.wait(a.clone(), soon()).await.unwrap();
        assert!(queues.wait(a.clone(), soon()).await.is_none());
        let other = queues.wait(b, soon()).await.unwrap();
        assert_eq!(queues.lock().len(), 2);
        drop((first, other));
        drop(queues.wait(a.clone(), soon()).await.unwrap());
        assert!(queues.lock().is_empty());
    }

    #[tokio::test]
    async fn waiters_that_stay_get_the_permit_in_order() {
        let queues = Arc::<Queues>::default();
        let until = Instant::now() + Duration::from_secs(60);
        let wait = || queues.wait(QueueKey::Writer, until);
        let mut permit = wait().await;
        let [mut a, mut b, mut c, mut d] = [(); 4].map(|()| Box::pin(wait()));
        for waiter in [&mut a, &mut b, &mut c, &mut d] {
            assert!(waiter.as_mut().now_or_never().is_none());
        }
        drop((a, c));
        for waiter in [&mut b, &mut d] {
            drop(permit);
            permit = waiter.as_mut().now_or_never().unwrap();
        }
        drop(permit);
        assert!(queues.lock().is_empty());
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn queue_is_blocked_until_a_request_has_succeeded() {
        let queues = Arc::<Queues>::default();
        let key = QueueKey::Resource(Resource::new("a").unwrap());
        assert!(!queues.is_blocked(&key));
        let first = queues.wait(key.clone(), soon()).await;
        assert!(queues.is_blocked(&key));
        // The queue still has a request, but later ones need not join it.
        queues.unblock(&key);
        assert!(!queues.is_blocked(&key));
        assert!(queues.wait(key.clone(), soon()).await.is_none());
        assert!(queues.is_blocked(&key));
        drop(first);
    }
}
