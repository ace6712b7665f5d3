//! Execution of a plan of faults. Faults of different servers may overlap, but each server has only
//! one fault at a time.

use std::{collections::BTreeMap, time::Instant};

use futures_util::future::join_all;
use tokio::{
    join,
    sync::Mutex,
    time::{Duration, sleep},
};

use crate::{
    clients::{TTL, process::ClientProcess},
    plan::{Fault, Planned},
    servers::{database::Database, disturb, freeze, leases::LeaseServers, services::Services},
    support::{pgbouncer::PgBouncer, proxy::Proxy},
};

/// The servers that all phases of a run share.
pub struct Targets {
    pub database: Mutex<Database>,
    /// The proxy in front of the database.
    pub address: Proxy,
    /// Locked by the fault that disturbs `address`.
    pub link: Mutex<()>,
    pub pooler: Mutex<PgBouncer>,
}

/// The servers and clients of a phase with one lease store.
pub struct Stage<'a> {
    pub targets: &'a Targets,
    pub services: Services,
    pub leases: LeaseServers,
    /// The clients that run in a separate process.
    pub clients: Mutex<ClientProcess>,
}

/// The number of faults of each kind that happened.
pub type Counts = BTreeMap<Fault, usize>;

/// Executes all faults of a plan. Returns after `length`, and after the end of the last fault.
pub async fn happen(stage: &Stage<'_>, plan: Vec<(Duration, Planned)>, length: Duration) -> Counts {
    let began = Instant::now();
    let happened = plan.into_iter().map(async |(at, planned)| {
        sleep(at.saturating_sub(began.elapsed())).await;
        let happened = stage.happen(planned, || began.elapsed() < length).await;
        (happened, planned.fault)
    });
    let mut counts = Counts::new();
    for (happened, fault) in join!(join_all(happened), sleep(length)).0 {
        *counts.entry(fault).or_default() += usize::from(happened);
    }
    counts
}

impl Stage<'_> {
    /// Executes a fault. Returns false if it did not happen, for example because its server was
    /// busy with other faults until the end of the phase.
    async fn happen(&self, planned: Planned, goes_on: impl Fn() -> bool) -> bool {
        use Fault::*;
        match planned.fault {
            ClientsFrozen | ClientsKilled => self.at_clients(planned).await,
            ServiceFrozen | ServiceKilled | ServiceCutOff | ServiceSlow | ServiceWithoutAnswer
            | ServiceSilent | ServiceClockJumps => return self.services.suffer(planned).await,
            PoolerFrozen => {
                let pooler = self.targets.pooler.lock().await;
                freeze(|signal| pooler.signal(signal), planned.lasts).await;
            }
            PoolerKilled => self.targets.pooler.lock().await.restart().await,
            // Faults of the database itself may happen at the same time.
            PostgresCutOff | PostgresSlow | PostgresWithoutAnswer | PostgresSilent => {
                let _alone = self.targets.link.lock().await;
                if !goes_on() {
                    return false;
                }
                disturb(&self.targets.address, planned).await;
            }
            NodeFrozen | NodeKilled | NodeFromOldFile | NodeFlushed | NodeEvicts | NodeCutOff
            | NodeSlow | NodeWithoutAnswer | NodeSilent | NodeClockJumps | NodePromoted => {
                return self.leases.suffer(planned).await;
            }
            RollingRestart => self.restart_all().await,
            _ => {
                let mut database = self.targets.database.lock().await;
                return goes_on() && database.suffer(planned, &self.targets.address).await;
            }
        }
        true
    }

    async fn at_clients(&self, planned: Planned) {
        let mut clients = self.clients.lock().await;
        if planned.fault == Fault::ClientsKilled {
            return clients.replace();
        }
        // Some of their leases expire during the pause.
        freeze(|signal| clients.signal(signal), TTL / 2 + planned.lasts).await;
    }

    /// Restarts all servers one after another, as in an upgrade.
    async fn restart_all(&self) {
        for service in &self.services.services {
            let mut service = service.lock().await;
            service.kill();
            service.start().await;
        }
        self.targets.pooler.lock().await.restart().await;
        if let Some(etcd) = &self.leases.etcd {
            let mut etcd = etcd.lock().await;
            for n in 0..self.leases.links.len() {
                etcd.kill(n);
                etcd.start_node(n);
                etcd.is_up().await;
            }
        }
        for node in &self.leases.nodes {
            let mut node = node.lock().await;
            node.kill();
            node.start_again().await;
        }
        let mut database = self.targets.database.lock().await;
        database.restart(false, Duration::ZERO).await;
    }
}
