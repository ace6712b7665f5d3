//! Clients that come and go do not empty the pool: a connection that is tested or opened for one who has gone away gets
//! to the pool all the same.

use std::{sync::Arc, time::Duration};

use shuttle::future::yield_now;

use super::{FOR_EVER, all, some_ms, tasks};
use crate::{
    fence::{conn::Connections, settings::Limits},
    model::{
        clock::sleep,
        sqlx::{Model, Options, Pool},
        tokio::time::timeout,
    },
};

pub async fn who_goes_away_closes_nothing() {
    let pool = Pool::<Model>::new(Options {
        connections: 2,
        acquire_timeout: FOR_EVER,
        failures: 0,
    });
    // One connection is there already, the other one not.
    drop(pool.acquire().await.unwrap());
    is_whole(&pool).await;
    let clients = tasks(5, |_| {
        let connections = Connections::new(pool.clone(), false, false, Arc::default());
        async move {
            let limits = Limits {
                pool_timeout: FOR_EVER,
                ..Limits::default()
            };
            let patience = some_ms([0, 1, 15, 16, 60]);
            if let Ok(Ok(checked_out)) = timeout(patience, connections.check_out(limits)).await {
                sleep(some_ms([0, 5])).await;
                connections.check_in(checked_out, limits);
            }
        }
    });
    all(clients).await;
    is_whole(&pool).await;
    // Later ones may have been seen through for a second, in vain.
    assert_eq!(pool.closed(), 0);
}

/// Waits until all connections are back. Where they never are, the search ends.
async fn is_whole(pool: &Pool<Model>) {
    while !pool.is_whole() {
        sleep(Duration::from_millis(5)).await;
        yield_now().await;
    }
}
