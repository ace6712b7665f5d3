//! Clients that come and go do not empty the pool: a connection that is tested or opened for one who has gone away gets
//! to the pool all the same.

use std::time::Duration;

use super::{FOR_EVER, all, some_ms, tasks};
use crate::{
    fence::{conn::Connections, settings::Limits},
    model::{
        clock::{never_stands_still, sleep},
        sqlx::{Model, Options, Pool},
        tokio::time::timeout,
    },
};

pub async fn who_goes_away_closes_nothing() {
    // Nobody sees an acquisition through for longer than a second.
    never_stands_still();
    let pool = Pool::<Model>::new(Options {
        connections: 2,
        acquire_timeout: FOR_EVER,
        failures: 0,
    });
    let clients = tasks(5, |_| {
        let connections = Connections::new(pool.clone());
        async move {
            let limits = Limits {
                pool_wait: FOR_EVER,
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
    while !pool.is_whole() {
        sleep(Duration::from_millis(5)).await;
        shuttle::future::yield_now().await;
    }
    assert_eq!(pool.closed(), 0);
}
