//! How issuers obtain epochs and end them, compared with a counter that handles both carelessly.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::join_all;
use sqlx::Sqlite;
use tokio::time::{Instant, sleep};
use tower_fence::{
    Fence,
    epochs::{Epoch, EpochFuture, Epochs, SourceId},
    lease::{Acquire, Leases, RedisLeases},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    lease::{LONG, grant, sku},
    redis::{COUNTER, RedisServer},
};

/// A source whose epochs arrive in a different order from that of the requests for them.
#[derive(Clone)]
struct Overtaken {
    fence: Fence<Sqlite>,
    taken: Arc<AtomicUsize>,
}

impl Epochs for Overtaken {
    fn next_epoch(&self, partition: u8, at_least: Epoch) -> EpochFuture<'_> {
        Box::pin(async move {
            let epoch = self.fence.next_epoch(partition, at_least).await;
            let first_is_late = [60, 5][self.taken.fetch_add(1, Relaxed) % 2];
            sleep(Duration::from_millis(first_is_late)).await;
            epoch
        })
    }

    fn report_epoch(&self, partition: u8, seen: Epoch) -> EpochFuture<'_> {
        self.fence.report_epoch(partition, seen)
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        self.fence.source_id()
    }
}

#[derive(Clone)]
enum Issuer {
    Ours(RedisLeases),
    Careless(redis::aio::MultiplexedConnection, Box<Overtaken>),
}

impl Issuer {
    async fn connect(ours: bool, server: &RedisServer, db: &Fresh<Sqlite>) -> Self {
        let epochs = Overtaken {
            fence: db.fence(),
            taken: Arc::default(),
        };
        if ours {
            let leases = RedisLeases::connect(&server.url(), epochs).await.unwrap();
            return Self::Ours(leases);
        }
        let client = redis::Client::open(server.url()).unwrap();
        let connection = client.get_multiplexed_async_connection().await.unwrap();
        Self::Careless(connection, Box::new(epochs))
    }

    /// Returns a token, and the times of its request and of its answer.
    async fn token(&self) -> (i64, Instant, Instant) {
        let began = Instant::now();
        let token = match self {
            Self::Ours(leases) => loop {
                if let Ok(lease) = leases.acquire(&sku(), Acquire::new(LONG)).await {
                    leases.release(&sku(), &lease.id).await.unwrap();
                    break lease.token.get();
                }
                sleep(Duration::from_millis(1)).await;
            },
            Self::Careless(connection, epochs) => careless_token(connection.clone(), epochs).await,
        };
        (token, began, Instant::now())
    }
}

/// Returns a token of the careless counter. The counter installs its epoch if it finds none,
/// without a second read. It never checks whether an epoch is exhausted.
async fn careless_token(
    mut connection: redis::aio::MultiplexedConnection,
    epochs: &Overtaken,
) -> i64 {
    let (mut take, mut install) = (redis::cmd("EVAL"), redis::cmd("HSET"));
    let script = "local epoch = redis.call('HGET', KEYS[1], 'epoch') \
                  return epoch and {epoch, redis.call('HINCRBY', KEYS[1], 'n', 1)}";
    take.arg(script).arg(1).arg(COUNTER);
    loop {
        let taken: Option<(i64, i64)> = take.query_async(&mut connection).await.unwrap();
        if let Some((epoch, n)) = taken {
            return epoch * Epoch::SIZE + n;
        }
        let epoch = epochs.next_epoch(110, Epoch::FIRST).await.unwrap().get();
        install.arg(COUNTER).arg("epoch").arg(epoch).arg("n").arg(0);
        let installed: redis::RedisResult<()> = install.query_async(&mut connection).await;
        installed.unwrap();
    }
}

/// Whether each token is higher than all tokens that were returned before its request.
fn in_order(tokens: &[(i64, Instant, Instant)]) -> bool {
    tokens.iter().all(|(token, began, _)| {
        let before = tokens.iter().filter(|(_, _, had)| had < began);
        before.into_iter().all(|(earlier, ..)| earlier < token)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_several_concurrent_issuers_installs_an_epoch() {
    for ours in [true, false] {
        let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
        let one = Issuer::connect(ours, &server, &db).await;
        let two = Issuer::connect(ours, &server, &db).await;
        let mut tokens = vec![];
        for _ in 0..5 {
            let asking = (0..8).map(|n| {
                let issuer = [&one, &two][n % 2];
                async move {
                    let mut tokens = vec![];
                    while tokens.len() < 20 {
                        tokens.push(issuer.token().await);
                        sleep(Duration::from_millis(2)).await;
                    }
                    tokens
                }
            });
            tokens.extend(join_all(asking).await.concat());
            server.command(&["FLUSHALL"]).await;
        }
        let repeated = {
            let mut values: Vec<i64> = tokens.iter().map(|(token, ..)| *token).collect();
            values.sort_unstable();
            values.windows(2).any(|pair| pair[0] == pair[1])
        };
        assert_eq!(in_order(&tokens) && !repeated, ours);
    }
}

#[tokio::test]
async fn exhausted_epoch_is_followed_by_a_higher_one() {
    for ours in [true, false] {
        let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
        let issuer = Issuer::connect(ours, &server, &db).await;
        let mut tokens = vec![issuer.token().await];
        server.command(&["HSET", COUNTER, "n", "999999997"]).await;
        for _ in 0..4 {
            tokens.push(issuer.token().await);
        }
        server.command(&["FLUSHALL"]).await;
        for _ in 0..4 {
            tokens.push(issuer.token().await);
        }
        let values: Vec<i64> = tokens.iter().map(|(token, ..)| *token).collect();
        let rising = values.is_sorted_by(|a, b| a < b);
        assert_eq!(rising, ours, "{values:?}");
        if ours {
            let token = |epoch, n| Epoch::new(epoch).unwrap().token(n).unwrap().get();
            let end = Epoch::SIZE - 1;
            let around_the_end = [token(1, end - 1), token(1, end), token(2, 1), token(2, 2)];
            assert_eq!(values[1..5], around_the_end);
        }
    }
}

#[tokio::test]
async fn database_behind_the_counter_does_not_lower_the_epoch() {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let leases = RedisLeases::connect(&server.url(), db.fence())
        .await
        .unwrap();
    let lease = grant(&leases, &sku(), LONG).await;
    leases.release(&sku(), &lease.id).await.unwrap();
    // The counter is far ahead, and belongs to another incarnation. The database has issued epoch
    // 1.
    server
        .command(&["HSET", COUNTER, "epoch", "70", "history", "0"])
        .await;
    assert_eq!(
        grant(&leases, &sku(), LONG).await.token,
        Epoch::new(71).unwrap().token(1).unwrap()
    );
}
