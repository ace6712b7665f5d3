//! The usual lock in Redis, on one node. It consists of `SET NX PX`, and a script that deletes the
//! key if the key still contains the holder's id. The lock has no token and no queue, so a waiter
//! retries after a pause.

use std::{sync::Arc, time::Duration};

use redis::{Script, aio::MultiplexedConnection};

/// The default maximum pause of a Redlock client.
const LONGEST_PAUSE_MS: u64 = 200;

#[derive(Clone)]
pub struct UsualLock {
    connection: MultiplexedConnection,
    unlock: Arc<Script>,
}

/// The id that unlocks the lock.
pub struct Id(String);

impl UsualLock {
    pub fn new(connection: MultiplexedConnection) -> Self {
        let unlock = "if redis.call('GET', KEYS[1]) == ARGV[1] then \
                          return redis.call('DEL', KEYS[1]) \
                      end \
                      return 0";
        Self {
            connection,
            unlock: Arc::new(Script::new(unlock)),
        }
    }

    /// Tries to take the lock, and returns `None` if another holder has it.
    pub async fn try_lock(&self, name: &str, ttl: Duration) -> Option<Id> {
        let id = format!("{:032x}", rand::random::<u128>());
        let mut command = redis::cmd("SET");
        command.arg(name).arg(&id).arg("NX");
        command.arg("PX").arg(ttl.as_millis().to_string());
        let mut connection = self.connection.clone();
        let answer: Option<String> = command
            .query_async(&mut connection)
            .await
            .expect("redis answers");
        answer.map(|_| Id(id))
    }

    pub async fn lock(&self, name: &str, ttl: Duration) -> Id {
        loop {
            if let Some(id) = self.try_lock(name, ttl).await {
                return id;
            }
            self.pause().await;
        }
    }

    /// Pauses between two attempts.
    pub async fn pause(&self) {
        let pause_ms = rand::random_range(0..LONGEST_PAUSE_MS);
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
    }

    pub async fn unlock(&self, name: &str, id: Id) {
        let mut connection = self.connection.clone();
        let mut invocation = self.unlock.key(name);
        let unlocked: i64 = invocation
            .arg(id.0)
            .invoke_async(&mut connection)
            .await
            .expect("redis answers");
        assert_eq!(unlocked, 1, "another client had it");
    }
}
