//! Faults of Postgres, of the network to it, and of PgBouncer.

use super::{Stage, disturb, freeze};
use crate::{
    clients::TTL,
    plan::{Fault, Planned},
    support::standby::Replication,
};

/// Terminates random sessions of clients, except the session that executes the statement.
const TERMINATE: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND random() < 0.5";
/// Cancels the statements of random sessions, except the session that executes this statement.
const CANCEL: &str = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity \
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND random() < 0.8";

/// Breaks all held leases.
const BREAK: &str = "SELECT tower_fence.break_lease(resource) FROM tower_fence.leases";

impl Stage {
    pub(super) async fn at_database(&self, planned: Planned, goes_on: impl Fn() -> bool) -> bool {
        let Planned { fault, lasts, .. } = planned;
        match fault {
            Fault::PoolerFrozen => {
                let pooler = self.targets.pooler.lock().await;
                freeze(|signal| pooler.signal(signal), lasts).await;
            }
            Fault::PoolerKilled => self.targets.pooler.lock().await.restart().await,
            Fault::PostgresCutOff
            | Fault::PostgresSlow
            | Fault::PostgresWithoutAnswer
            | Fault::PostgresSilent => return self.at_link(planned, goes_on).await,
            _ => return self.at_server(planned, goes_on).await,
        }
        true
    }

    /// Disturbs the network to the database. Faults of the database itself may happen at the same
    /// time.
    async fn at_link(&self, planned: Planned, goes_on: impl Fn() -> bool) -> bool {
        let _alone = self.targets.link.lock().await;
        if !goes_on() {
            return false;
        }
        disturb(&self.targets.address, planned.fault, planned.lasts).await;
        true
    }

    async fn at_server(&self, planned: Planned, goes_on: impl Fn() -> bool) -> bool {
        let Planned {
            fault,
            lasts,
            choice,
            ..
        } = planned;
        let mut database = self.targets.database.lock().await;
        if !goes_on() {
            return false;
        }
        match fault {
            Fault::PostgresFrozen => database.freeze(lasts).await,
            Fault::PostgresKilled => database.restart(true, lasts).await,
            Fault::PostgresRestarted => database.restart(false, lasts).await,
            Fault::PostgresClockJumps => {
                // The jump is shorter than the retention of idempotency keys.
                let jump = ["+1h", "-1h", "-3s"][choice % 3];
                let jumped = database.run_with_clock(jump, TTL / 2 + lasts).await;
                if jump.starts_with('+') {
                    // Leases that were granted while the clock was ahead expire only after an hour.
                    // Break these leases, so that clients can write to the resources.
                    for _ in 0..5 {
                        if database.try_execute(BREAK).await {
                            break;
                        }
                    }
                }
                return jumped;
            }
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
                let failover = database
                    .fail_over(&self.targets.address, replication, lasts / 4)
                    .await;
                self.failovers.lock().await.push(failover);
            }
        }
        true
    }
}
