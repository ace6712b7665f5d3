//! Faults of Redis and etcd, and of the network to them.

use tokio::{join, sync::Mutex, time::sleep};

use super::{Stage, disturb, freeze};
use crate::{
    plan::{Fault, Planned},
    servers::leases::try_command,
    support::{etcd::EtcdCluster, wall_clock::is_wrong},
};

impl Stage {
    pub(super) async fn at_node(&self, planned: Planned) -> bool {
        let Planned {
            fault,
            lasts,
            choice,
            ..
        } = planned;
        if let Some(etcd) = &self.leases.etcd {
            return self.at_etcd(etcd, planned).await;
        }
        let mut n = choice % self.leases.nodes.len();
        if fault == Fault::NodePromoted {
            return self.leases.promote(choice).await;
        }
        if fault == Fault::NodeClockJumps {
            let jump = ["+1d", "-1h", "+30y", "-3s"][choice % 4];
            self.leases.clock.jump_to(jump);
            let (time, ()) = join!(self.leases.time(), sleep(lasts));
            self.leases.clock.jump_to("+0");
            if jump.starts_with('+') {
                // Leases that were granted while the clock was ahead expire only after a day or
                // thirty years.
                let node = self.leases.nodes[0].lock().await;
                try_command(node.url(), &["FLUSHALL"]).await;
            }
            return is_wrong(time);
        }
        if matches!(fault, Fault::NodeFlushed | Fault::NodeEvicts) {
            let Some(master) = self.leases.find(choice, "master").await else {
                return false;
            };
            n = master;
        }
        let mut node = self.leases.nodes[n].lock().await;
        match fault {
            Fault::NodeFrozen => freeze(|signal| node.signal(signal), lasts).await,
            // The node restarts empty, or with the last file that was saved.
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
            _ => disturb(&self.leases.links[n], fault, lasts).await,
        }
        true
    }

    async fn at_etcd(&self, etcd: &Mutex<EtcdCluster>, planned: Planned) -> bool {
        let Planned {
            fault,
            lasts,
            choice,
            ..
        } = planned;
        let n = choice % self.leases.links.len();
        match fault {
            Fault::NodeFrozen => {
                let etcd = etcd.lock().await;
                freeze(|signal| etcd.signal(n, signal), lasts).await;
            }
            Fault::NodeKilled => {
                let mut etcd = etcd.lock().await;
                etcd.kill(n);
                sleep(lasts).await;
                etcd.start_node(n);
                etcd.is_up().await;
            }
            // The restored cluster keeps its name, so etcd treats it as the same cluster.
            Fault::NodeFromOldFile => {
                let mut etcd = etcd.lock().await;
                etcd.is_up().await;
                let snapshot = etcd.save(&format!("snapshot-{choice}-{}", lasts.as_millis()));
                sleep(lasts).await;
                etcd.restore(&snapshot, "the-cluster").await;
            }
            Fault::NodeFlushed => {
                let etcd = etcd.lock().await;
                etcd.is_up().await;
                etcd.delete_all().await;
            }
            _ => disturb(&self.leases.links[n], fault, lasts).await,
        }
        true
    }
}
