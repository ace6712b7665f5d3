//! Execution of a plan of faults. Faults of different servers may overlap, but each server has only
//! one fault at a time.

mod clients;
mod database;
mod leases;
mod services;

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use futures_util::future::join_all;
use tokio::{
    sync::Mutex,
    time::{Duration, sleep},
};

use crate::{
    clients::{TTL, process::ClientProcess},
    history::Failover,
    plan::{Fault, Planned},
    servers::{database::Database, leases::LeaseServers, services::Services},
    support::{
        pgbouncer::PgBouncer,
        proxy::{Link, Proxy},
    },
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
pub struct Stage {
    pub targets: Arc<Targets>,
    pub services: Services,
    pub leases: LeaseServers,
    /// The clients that run in a separate process.
    pub clients: Mutex<ClientProcess>,
    pub failovers: Mutex<Vec<Failover>>,
}

/// The number of faults of each kind that happened.
pub type Counts = BTreeMap<Fault, usize>;

/// Executes all faults of a plan, and waits for the end of the last one.
pub async fn happen(stage: &Stage, plan: Vec<Planned>) -> Counts {
    let began = Instant::now();
    let over = plan.last().map_or(Duration::ZERO, |last| last.at);
    let happened = plan.into_iter().map(async |planned| {
        sleep(planned.at.saturating_sub(began.elapsed())).await;
        let happened = stage.happen(planned, || began.elapsed() < over).await;
        (happened, planned.fault)
    });
    let mut counts = Counts::new();
    for (happened, fault) in join_all(happened).await {
        *counts.entry(fault).or_default() += usize::from(happened);
    }
    counts
}

impl Stage {
    /// Executes a fault. Returns false if it did not happen, for example because its server was
    /// busy with other faults until the end of the plan.
    async fn happen(&self, planned: Planned, goes_on: impl Fn() -> bool) -> bool {
        use Fault::*;
        match planned.fault {
            ClientsFrozen | ClientsKilled => self.at_clients(planned).await,
            ServiceFrozen | ServiceKilled | ServiceCutOff | ServiceSlow | ServiceWithoutAnswer
            | ServiceSilent | ServiceClockJumps => self.at_service(planned).await,
            PoolerFrozen
            | PoolerKilled
            | PostgresFrozen
            | PostgresKilled
            | PostgresRestarted
            | PostgresClockJumps
            | PostgresCutOff
            | PostgresSlow
            | PostgresWithoutAnswer
            | PostgresSilent
            | BackendFrozen
            | BackendKilled
            | BackendsTerminated
            | BackendsCanceled
            | Checkpoint
            | NoSpace
            | FailoverSynchronous
            | FailoverAsynchronous => self.at_database(planned, goes_on).await,
            NodeFrozen | NodeKilled | NodeFromOldFile | NodeFlushed | NodeEvicts | NodeCutOff
            | NodeSlow | NodeWithoutAnswer | NodeSilent | NodeClockJumps | NodePromoted => {
                self.at_node(planned).await
            }
            RollingRestart => self.restart_all().await,
        }
    }

    /// Restarts all servers one after another, as in an upgrade.
    async fn restart_all(&self) -> bool {
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
        true
    }
}

/// Freezes a process for a while.
async fn freeze(signal: impl Fn(&str), lasts: Duration) {
    signal("-STOP");
    sleep(lasts).await;
    signal("-CONT");
}

/// Disturbs the network to a service, to a node or to Postgres for a while.
async fn disturb(link: &Proxy, fault: Fault, lasts: Duration) {
    use Fault::*;
    let (state, lasts) = match fault {
        ServiceSlow | PostgresSlow | NodeSlow => {
            // Each message is delayed.
            link.slow_down(Duration::from_millis(20));
            sleep(lasts).await;
            return link.slow_down(Duration::ZERO);
        }
        ServiceCutOff | PostgresCutOff | NodeCutOff => (Link::Cut, lasts),
        ServiceSilent | PostgresSilent | NodeSilent => (Link::Silent, TTL / 2 + lasts),
        ServiceWithoutAnswer | PostgresWithoutAnswer | NodeWithoutAnswer => (Link::NoAnswer, lasts),
        other => unreachable!("{other:?} is not a fault of a link"),
    };
    link.set(state);
    sleep(lasts).await;
    link.set(Link::Whole);
}
