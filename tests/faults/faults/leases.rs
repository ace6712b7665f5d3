//! Faults of Redis, and of the way to it.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::{Stage, disturb, slow_down};
use crate::{
    plan::{Fault, Planned},
    support::{proxy::Link, redis::RedisServer},
};

impl Stage {
    pub(super) async fn at_node(&self, planned: Planned) -> bool {
        let Planned {
            fault,
            lasts,
            choice,
            ..
        } = planned;
        let n = choice % self.leases.nodes.len();
        if fault == Fault::NodeClockJumps {
            let jump = ["+1d", "-1h", "+30y", "-3s"][choice % 4];
            self.leases.clock.jump_to(jump);
            sleep(lasts).await;
            self.leases.clock.jump_to("+0");
            if jump.starts_with('+') {
                // Leases that were taken meanwhile end in a day, or in thirty years.
                let node = self.leases.nodes[0].lock().await;
                command(&node, &["FLUSHALL"]).await;
            }
            return true;
        }
        let mut node = self.leases.nodes[n].lock().await;
        match fault {
            Fault::NodeFrozen => {
                node.signal("-STOP");
                sleep(lasts).await;
                node.signal("-CONT");
            }
            // Without a file it comes back empty, or has the last one that was saved.
            Fault::NodeKilled => {
                node.kill();
                sleep(lasts).await;
                node.start_again().await;
            }
            Fault::NodeFromOldFile => {
                command(&node, &["SAVE"]).await;
                sleep(lasts).await;
                node.kill();
                node.start_again().await;
            }
            Fault::NodeFlushed => command(&node, &["FLUSHALL"]).await,
            Fault::NodeEvicts => {
                let policy = ["CONFIG", "SET", "maxmemory-policy", "allkeys-random"];
                command(&node, &policy).await;
                command(&node, &["CONFIG", "SET", "maxmemory", "1"]).await;
                sleep(lasts).await;
                command(&node, &["CONFIG", "SET", "maxmemory", "0"]).await;
            }
            Fault::NodeCutOff => disturb(&self.leases.links[n], Link::Cut, lasts).await,
            Fault::NodeSlow => slow_down(&self.leases.links[n], lasts).await,
            _ => disturb(&self.leases.links[n], Link::NoAnswer, lasts).await,
        }
        true
    }
}

/// Runs a command, if the server can.
async fn command(node: &RedisServer, words: &[&str]) {
    let run = async {
        let client = redis::Client::open(node.url())?;
        let mut connection = client.get_multiplexed_async_connection().await?;
        let mut command = redis::cmd(words[0]);
        command
            .arg(&words[1..])
            .query_async::<redis::Value>(&mut connection)
            .await
    };
    let _ = timeout(Duration::from_secs(5), run).await;
}
