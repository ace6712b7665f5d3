//! The queue of a resource: writes run one at a time and in order, and the queue is removed after
//! the last write.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use super::{FOR_EVER, all, some_ms, tasks};
use crate::{
    fence::local::queue::{QueueKey, Queues},
    model::{
        clock::{Instant, sleep},
        tokio::time::timeout,
    },
    token::Resource,
};

pub async fn one_at_a_time() {
    let queues = Arc::<Queues>::default();
    let inside = Arc::new(AtomicBool::new(false));
    let waiters = tasks(5, |n| {
        let (queues, inside) = (queues.clone(), inside.clone());
        async move {
            let key = QueueKey::Resource(Resource::new("a").unwrap());
            let stays = n < 2;
            let patience = if stays { FOR_EVER } else { some_ms([0, 1, 5]) };
            let wait = queues.wait(key, Instant::now() + patience);
            // Some waiters reach their own timeout, and others are dropped.
            let permit = match n {
                4 => timeout(some_ms([0, 1, 5]), wait).await.ok().flatten(),
                _ => wait.await,
            };
            assert!(permit.is_some() || !stays);
            if permit.is_some() {
                assert!(
                    !inside.swap(true, SeqCst),
                    "two writes run at the same time"
                );
                sleep(some_ms([0, 1, 3])).await;
                inside.store(false, SeqCst);
            }
            drop(permit);
        }
    });
    all(waiters).await;
    assert!(queues.lock().is_empty());
}
