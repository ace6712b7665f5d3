//! Clients that connect and disconnect do not empty the pool. If a client disconnects while a
//! connection is tested or opened for it, the connection still returns to the pool.

use super::{FOR_EVER, all, some_ms, tasks};
use crate::{
    fence::{conn::Connections, settings::Limits, sql::Names},
    model::{
        clock::sleep,
        sqlx::{Model, Options, Pool},
        tokio::time::timeout,
    },
};

pub async fn disconnecting_clients_close_no_connection() {
    let pool = Pool::<Model>::new(Options {
        connections: 2,
        acquire_timeout: FOR_EVER,
        failures: 0,
    });
    // The pool has one open connection, and may open another one.
    drop(pool.acquire().await.unwrap());
    pool.is_whole().await;
    let clients = tasks(5, |_| {
        let connections = Connections::new(pool.clone(), false, Names);
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
    pool.is_whole().await;
    // An acquisition may be abandoned after a second, so only closings in the first second are
    // counted.
    assert_eq!(pool.closed(), 0);
}
