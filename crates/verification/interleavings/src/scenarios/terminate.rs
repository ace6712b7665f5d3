//! Statements that were left behind are ended over one connection beside the pool, which is closed with the last of them.

use std::{sync::Arc, time::Duration};

use super::{FOR_EVER, all, some_ms, tasks};
use crate::{
    fence::{conn::terminate::Terminations, sql::AdvisoryLock},
    model::{
        apart,
        clock::sleep,
        sqlx::{Model, Options, Pool},
        tokio::time::timeout,
    },
};

/// Some have little time for it, and some requests are dropped in the middle.
pub async fn one_connection_ends_them_all() {
    apart::reset();
    let pool = Pool::<Model>::new(Options {
        connections: 1,
        acquire_timeout: FOR_EVER,
        failures: 0,
    });
    let terminations = Arc::new(Terminations::<Model>::new());
    let all_tasks = tasks(5, |n| {
        let (terminations, pool) = (terminations.clone(), pool.clone());
        async move {
            sleep(some_ms([0, 1, 3])).await;
            let within = match n {
                0 | 1 => some_ms([1, 2]),
                _ => FOR_EVER,
            };
            let ended = terminations.terminate(&pool, AdvisoryLock(n as i64), within);
            match n {
                2 => drop(timeout(some_ms([0, 1, 2]), ended).await),
                _ => ended.await,
            }
        }
    });
    all(all_tasks).await;
    let seen = apart::seen();
    assert!(seen.most <= 1, "{seen:?}");
    assert!(!seen.used_again, "{seen:?}");
    sleep(Duration::from_millis(1)).await;
    assert_eq!(apart::seen().open, 0, "it stays open");
}
