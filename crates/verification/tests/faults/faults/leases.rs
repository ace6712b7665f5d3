//! Faults of Redis, and of the way to it.

use tokio::{join, time::sleep};

use super::{Stage, disturb, slow_down};
use crate::{
    clients::TTL,
    plan::{Fault, Planned},
    servers::leases::try_command,
    support::{proxy::Link, wall_clock::is_wrong},
};

impl Stage {
    pub(super) async fn at_node(&self, planned: Planned) -> bool {
        let Planned {
            fault,
            lasts,
            choice,
            ..
        } = planned;
        let mut n = choice % self.leases.nodes.len();
        if fault == Fault::NodePromoted {
            return self.leases.promote(choice).await;
        }
        if fault == Fault::NodeClockJumps {
            let jump = ["+1d", "-1h", "+30y", "-3s"][choice % 4];
            self.leases.clock.jump_to(jump);
            let (told, ()) = join!(self.leases.time(), sleep(lasts));
            self.leases.clock.jump_to("+0");
            if jump.starts_with('+') {
                // Leases that were taken meanwhile end in a day, or in thirty years.
                let node = self.leases.nodes[0].lock().await;
                try_command(node.url(), &["FLUSHALL"]).await;
            }
            return is_wrong(told);
        }
        if matches!(fault, Fault::NodeFlushed | Fault::NodeEvicts) {
            let Some(master) = self.leases.find(choice, "master").await else {
                return false;
            };
            n = master;
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
                if try_command(node.url(), &["SAVE"]).await.is_none() {
                    return false;
                }
                sleep(lasts).await;
                node.kill();
                node.start_again().await;
            }
            Fault::NodeFlushed => return try_command(node.url(), &["FLUSHALL"]).await.is_some(),
            Fault::NodeEvicts => {
                let policy = ["CONFIG", "SET", "maxmemory-policy", "allkeys-random"];
                try_command(node.url(), &policy).await;
                let little = try_command(node.url(), &["CONFIG", "SET", "maxmemory", "1"]).await;
                sleep(lasts).await;
                try_command(node.url(), &["CONFIG", "SET", "maxmemory", "0"]).await;
                return little.is_some();
            }
            Fault::NodeSilent => {
                disturb(&self.leases.links[n], Link::Silent, TTL / 2 + lasts).await
            }
            Fault::NodeCutOff => disturb(&self.leases.links[n], Link::Cut, lasts).await,
            Fault::NodeSlow => slow_down(&self.leases.links[n], lasts).await,
            _ => disturb(&self.leases.links[n], Link::NoAnswer, lasts).await,
        }
        true
    }
}
