//! Has the faults of a plan happen, several at once, and each server in one at a time.

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
    clients::process::ClientProcess,
    history::Failover,
    plan::{Fault, Planned},
    servers::{database::Database, leases::LeaseServers, services::Services},
    support::{
        pgbouncer::PgBouncer,
        proxy::{Link, Proxy},
    },
};

/// All that faults are at.
pub struct Targets {
    pub database: Mutex<Database>,
    /// Where the database is found.
    pub address: Proxy,
    /// Whoever disturbs the way there.
    pub link: Mutex<()>,
    pub pooler: Mutex<PgBouncer>,
}

/// What is there for one lease store.
pub struct Stage {
    pub targets: Arc<Targets>,
    pub services: Services,
    pub leases: LeaseServers,
    /// Those that are not in this process.
    pub clients: Mutex<ClientProcess>,
    pub failovers: Mutex<Vec<Failover>>,
}

/// How often each of them happened.
pub type Counts = BTreeMap<Fault, usize>;

/// Has all of them happen, and waits until the last one is over.
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
    /// Whether it happened: one that has waited for its server until the end does not.
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

    /// One after the other, as for an upgrade.
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

/// A link that is like this for a while.
async fn disturb(link: &Proxy, state: Link, lasts: Duration) {
    link.set(state);
    sleep(lasts).await;
    link.set(Link::Whole);
}

/// A link on which each message takes a while.
async fn slow_down(link: &Proxy, lasts: Duration) {
    link.slow_down(Duration::from_millis(20));
    sleep(lasts).await;
    link.slow_down(Duration::ZERO);
}
