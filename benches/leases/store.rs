//! The stores: a Redis server, and a Postgres server with the epochs. The bench starts both.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use sqlx::postgres::PgPoolOptions;
use tokio::runtime::Runtime;
use tower_fence::{Fence, lease::RedisLeases};
use tower_fence_etcd::{EtcdLeases, EtcdLeasesBuilder};

use crate::{
    contenders::{MAX_WAITERS, OURS},
    support::{postgres::PostgresServer, program::Program, rounds::Outcome},
    usual::UsualLock,
};

pub struct Store {
    pub runtime: Arc<Runtime>,
    pub redis: Program,
    fence: Fence<sqlx::Postgres>,
    connection: MultiplexedConnection,
}

impl Store {
    pub fn start(runtime: Arc<Runtime>, postgres: &PostgresServer) -> Self {
        let redis = Program::redis();
        let (fence, connection) = runtime.block_on(async {
            let pool = PgPoolOptions::new().max_connections(4);
            let pool = pool.connect(&postgres.url("postgres")).await;
            let fence = Fence::new(pool.expect("postgres answers"));
            fence.migrate().await.expect("the fence's tables");
            let client = redis::Client::open(format!("redis://{}", redis.addr));
            let client = client.expect("a URL");
            let connection = client.get_multiplexed_async_connection().await;
            (fence, connection.expect("redis answers"))
        });
        Self {
            runtime,
            redis,
            fence,
            connection,
        }
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.redis.addr)
    }

    /// Returns the source of the epochs.
    pub fn fence(&self) -> Fence<sqlx::Postgres> {
        self.fence.clone()
    }

    /// Connects to another Redis server.
    pub fn connect(&self, redis: &Program) -> MultiplexedConnection {
        let client = redis::Client::open(format!("redis://{}", redis.addr));
        let client = client.expect("a URL");
        let connection = client.get_multiplexed_async_connection();
        self.runtime.block_on(connection).expect("redis answers")
    }

    pub fn leases(&self, prefix: &str) -> RedisLeases {
        let builder = RedisLeases::builder(self.fence.clone()).key_prefix(prefix);
        let leases = self.runtime.block_on(builder.connect(&self.url()));
        leases.expect("redis answers").max_waiters(MAX_WAITERS)
    }

    pub fn in_etcd(&self, etcd: &Program) -> EtcdLeases {
        let builder = EtcdLeasesBuilder::new(self.fence());
        let url = format!("http://{}", etcd.addr);
        let leases = self.runtime.block_on(builder.connect(&[url]));
        leases.expect("etcd answers")
    }

    pub fn usual(&self) -> UsualLock {
        UsualLock::new(self.connection.clone())
    }

    pub fn query<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        let mut connection = self.connection.clone();
        let mut command = redis::cmd(words[0]);
        let answer = command.arg(&words[1..]).query_async(&mut connection);
        self.runtime.block_on(answer).expect("redis answers")
    }

    /// Returns a number from the output of INFO.
    pub fn info(&self, section: &str, field: &str) -> u64 {
        let text: String = self.query(&["INFO", section]);
        let value = text.lines().find_map(|line| line.strip_prefix(field));
        let value = value.and_then(|value| value.strip_prefix(':')?.parse().ok());
        value.unwrap_or_else(|| panic!("no {field} in {text}"))
    }

    /// Returns the number of times that clients have sent this command or scripts have called it.
    pub fn calls(&self, command: &str) -> u64 {
        let text: String = self.query(&["INFO", "commandstats"]);
        let start = format!("cmdstat_{command}:calls=");
        let calls = text.lines().find_map(|line| line.strip_prefix(&start));
        let calls = calls.and_then(|calls| calls.split(',').next()?.parse().ok());
        calls.unwrap_or(0)
    }

    /// Returns the number of leases granted under a prefix.
    ///
    /// Each grant takes a token from a counter.
    pub fn granted(&self, prefix: &str) -> u64 {
        let clocks: Vec<String> = self.query(&["KEYS", &format!("{prefix}:*:clock")]);
        let counts = clocks.iter().map(|clock| {
            let n: u64 = self.query(&["HGET", clock, "n"]);
            n
        });
        counts.sum()
    }

    /// Checks that the number of granted leases matches the outcome of this crate's contender.
    pub fn assert_granted(&self, prefix: &str, outcomes: &[Outcome]) {
        let ours = outcomes.iter().find(|outcome| outcome.name == OURS);
        assert_eq!(self.granted(prefix), ours.map_or(0, Outcome::done));
    }

    /// Checks that no lease is held and no request waits.
    pub fn assert_all_free(&self) {
        assert_all_free(self.query(&["KEYS", "*"]));
    }

    /// Checks that no lease is held on a server.
    pub fn assert_free(&self, server: &Program) {
        let mut connection = self.connect(server);
        let keys = async {
            redis::cmd("KEYS")
                .arg("*")
                .query_async(&mut connection)
                .await
        };
        assert_all_free(self.runtime.block_on(keys).expect("redis answers"));
    }
}

fn assert_all_free(keys: Vec<String>) {
    let counters = [":clock", ":counter"];
    let is_left = |key: &&String| !counters.iter().any(|end| key.ends_with(end));
    assert_eq!(
        keys.iter().find(is_left),
        None,
        "something was not released"
    );
}
