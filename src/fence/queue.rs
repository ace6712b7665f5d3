//! Who of this process waits for a resource, and who has it.
//!
//! The row lock would see to the order by itself, but whoever waits for it holds a connection of the
//! pool meanwhile: a hot resource would take all of them, and starve the others. So they wait here
//! first, and only the one whose turn it is takes a connection.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

use crate::token::Resource;

/// What can be waited for.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) enum Wanted {
    Resource(Resource),
    /// An idempotency key, and the digest of its scope.
    Key([u8; 32], String),
}

/// The queues of all that somebody has or waits for. First come, first served.
#[derive(Default)]
pub(super) struct Queues {
    queues: Mutex<HashMap<Wanted, Arc<Semaphore>>>,
}

/// The right to take a connection for it, until this is dropped.
pub(crate) struct Turn {
    // Dropped in this order: the queue is empty only after the turn has ended.
    _permit: OwnedSemaphorePermit,
    _place: Place,
}

impl Queues {
    /// Waits for the turn; `None` when it did not come in time.
    ///
    /// Dropped while it waits, it leaves the queue.
    pub(super) async fn turn(self: &Arc<Self>, wanted: Wanted, until: Instant) -> Option<Turn> {
        let queue = {
            let mut queues = self.lock();
            let one_at_a_time = || Arc::new(Semaphore::new(1));
            Arc::clone(queues.entry(wanted.clone()).or_insert_with(one_at_a_time))
        };
        let place = Place {
            queues: Arc::clone(self),
            wanted,
            queue: Some(Arc::clone(&queue)),
        };
        let permit = timeout_at(until, queue.acquire_owned()).await.ok()?.ok()?;
        Some(Turn {
            _permit: permit,
            _place: place,
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Wanted, Arc<Semaphore>>> {
        // Nothing panics while the lock is held.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in a queue. The last one takes the queue with it.
struct Place {
    queues: Arc<Queues>,
    wanted: Wanted,
    queue: Option<Arc<Semaphore>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queues = self.queues.lock();
        self.queue = None;
        if queues
            .get(&self.wanted)
            .is_some_and(|queue| Arc::strong_count(queue) == 1)
        {
            queues.remove(&self.wanted);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    #[tokio::test]
    async fn one_at_a_time_and_nothing_is_left_behind() {
        let queues = Arc::<Queues>::default();
        let [a, b] = ["a", "b"].map(|name| Wanted::Resource(Resource::new(name).unwrap()));
        let first = queues.turn(a.clone(), soon()).await.unwrap();
        assert!(queues.turn(a.clone(), soon()).await.is_none());
        let other = queues.turn(b, soon()).await.unwrap();
        assert_eq!(queues.lock().len(), 2);
        drop((first, other));
        drop(queues.turn(a.clone(), soon()).await.unwrap());
        assert!(queues.lock().is_empty());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn turns_that_race_exclude_each_other_and_leave_nothing_behind() {
        let queues = Arc::<Queues>::default();
        let inside = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let tasks = (0..8).map(|n| {
            let (queues, inside) = (queues.clone(), inside.clone());
            tokio::spawn(async move {
                let resource = Wanted::Resource(Resource::new("a").unwrap());
                for round in 0..500 {
                    let until = Instant::now() + Duration::from_millis((n + round) % 3);
                    if let Some(turn) = queues.turn(resource.clone(), until).await {
                        assert!(!inside.swap(true, std::sync::atomic::Ordering::SeqCst));
                        tokio::task::yield_now().await;
                        inside.store(false, std::sync::atomic::Ordering::SeqCst);
                        drop(turn);
                    }
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        assert!(queues.lock().is_empty());
    }
}
