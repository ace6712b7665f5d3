//! Faults of Postgres, of the way to it, and of PgBouncer.

use tokio::time::sleep;

use super::{Stage, disturb, slow_down};
use crate::{
    clients::TTL,
    plan::{Fault, Planned},
    support::{proxy::Link, standby::Replication},
};

/// All but its own session; those that serve clients.
const TERMINATE: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND random() < 0.5";
const CANCEL: &str = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity \
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND random() < 0.8";

impl Stage {
    pub(super) async fn at_database(&self, planned: Planned, goes_on: impl Fn() -> bool) -> bool {
        let Planned {
            fault,
            lasts,
            choice,
            ..
        } = planned;
        if matches!(fault, Fault::PoolerFrozen | Fault::PoolerKilled) {
            let mut pooler = self.targets.pooler.lock().await;
            match fault {
                Fault::PoolerKilled => pooler.restart().await,
                _ => {
                    pooler.signal("-STOP");
                    sleep(lasts).await;
                    pooler.signal("-CONT");
                }
            }
            return true;
        }
        let address = &self.targets.address;
        let mut database = self.targets.database.lock().await;
        if !goes_on() {
            return false;
        }
        match fault {
            Fault::PostgresFrozen => database.freeze(lasts).await,
            Fault::PostgresKilled => database.restart(true, lasts).await,
            Fault::PostgresRestarted => database.restart(false, lasts).await,
            Fault::PostgresCutOff => disturb(address, Link::Cut, lasts).await,
            Fault::PostgresSlow => slow_down(address, lasts).await,
            Fault::PostgresWithoutAnswer => disturb(address, Link::NoAnswer, lasts).await,
            Fault::PostgresSilent => disturb(address, Link::Silent, TTL / 2 + lasts).await,
            Fault::BackendFrozen => {
                return database.freeze_one_backend(choice, TTL / 2 + lasts).await;
            }
            Fault::BackendKilled => return database.kill_one_backend(choice).await,
            Fault::BackendsTerminated => return database.try_execute(TERMINATE).await,
            Fault::BackendsCanceled => return database.try_execute(CANCEL).await,
            Fault::Checkpoint => return database.try_execute("CHECKPOINT").await,
            Fault::NoSpace => return database.no_space(lasts).await,
            _ => {
                let replication = match fault {
                    Fault::FailoverSynchronous => Replication::Synchronous,
                    _ => Replication::Asynchronous,
                };
                let failover = database.fail_over(address, replication, lasts / 4).await;
                self.failovers.lock().await.push(failover);
            }
        }
        true
    }
}
