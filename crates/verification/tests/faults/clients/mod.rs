//! The clients, modelled on Jepsen's tests of etcd's locks. Each client acquires a lease, reads,
//! pauses, writes, and starts again. Each workload runs with the fence and without it.

mod call;
pub mod process;
mod record;
mod sql;
mod workloads;

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use tokio::{sync::watch, task::JoinSet, time::sleep};
use tower_fence::{Resource, client::HttpLeases};

use crate::{
    history::Recorder,
    tables::{FENCED, Tables, UNFENCED},
};

/// The TTL of a lease. The long pauses of some holders exceed it.
pub const TTL: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_secs(5);
/// The timeout of a request.
const PATIENCE: Duration = Duration::from_secs(8);

/// A workload: its name, its first resource and the resource after its last one, and the number of
/// its clients.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    pub name: &'static str,
    resources: (usize, usize),
    pub clients: usize,
}

/// Returns the name of the workload of a resource.
pub fn workload_of(resource: usize) -> &'static str {
    let is_of = |workload: &&Workload| resource < workload.resources.1;
    WORKLOADS
        .iter()
        .find(is_of)
        .map_or("", |workload| workload.name)
}

const fn workload(name: &'static str, first: usize, last: usize, clients: usize) -> Workload {
    Workload {
        name,
        resources: (first, last),
        clients,
    }
}

/// All workloads.
pub const WORKLOADS: [Workload; 8] = [
    workload("counter", 0, 6, 4),
    workload("sql", 4, 8, 3),
    workload("set", 8, 12, 4),
    workload("transfers", 12, 16, 3),
    workload("repeated", 16, 20, 3),
    workload("queue", 20, 22, 4),
    workload("stream", 22, 25, 2),
    workload("sql stream", 25, 28, 2),
];

/// The number of resources.
pub const RESOURCES: usize = 28;
/// The pairs of resources whose balances have a constant sum.
pub const PAIRS: [(usize, usize, i64); 2] = [(12, 14, 0), (14, 16, 0)];

/// The side of a client: with the fence, or without it.
pub struct Side {
    pub tables: Tables,
    pub is_fenced: bool,
    pub names: Vec<String>,
    pub recorder: Recorder,
    /// The number of acknowledged writes of each resource.
    pub done: [AtomicU64; RESOURCES],
}

impl Side {
    /// Returns the side with the fence and the side without it. `recorder` takes whether the side
    /// is fenced.
    pub fn both(settings: &Settings, recorder: fn(bool) -> Recorder) -> [Arc<Self>; 2] {
        [FENCED, UNFENCED].map(|tables| {
            let name = |n| format!("{}-{}-{n}", settings.prefix, tables.side);
            let is_fenced = tables == FENCED;
            Arc::new(Self {
                tables,
                is_fenced,
                names: (0..RESOURCES).map(name).collect(),
                recorder: recorder(is_fenced),
                done: [const { AtomicU64::new(0) }; RESOURCES],
            })
        })
    }
}

/// The settings of the clients in a process.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Settings {
    /// The URLs of the services.
    pub urls: Vec<String>,
    pub database: String,
    pub store: String,
    /// The prefix of the names of the resources.
    pub prefix: String,
    pub seed: u64,
    /// The number of the process: 0 for the run itself.
    pub process: u32,
}

/// The distance between the first entries of successive processes, so that entries are unique.
const ENTRIES: i64 = 1_000_000_000;

/// The servers, as clients reach them.
struct Servers {
    settings: Settings,
    leases: Vec<HttpLeases>,
    http: reqwest::Client,
    entries: AtomicI64,
}

impl Servers {
    fn new(settings: &Settings) -> Self {
        let leases = settings.urls.iter().map(|url| {
            let leases = HttpLeases::new(&format!("{url}/locks")).unwrap();
            leases.answer_timeout(PATIENCE)
        });
        let http = reqwest::Client::builder().timeout(PATIENCE);
        Self {
            leases: leases.collect(),
            http: http.build().unwrap(),
            entries: AtomicI64::new(ENTRIES * i64::from(settings.process) + 1),
            settings: settings.clone(),
        }
    }
}

/// One client.
struct Client {
    servers: Arc<Servers>,
    side: Arc<Side>,
    workload: usize,
    random: StdRng,
    stop: watch::Receiver<bool>,
    /// The connection of a client that uses SQL.
    connection: Option<PgConnection>,
}

/// Starts the clients of both sides. `counts` is the number of clients of each workload.
pub fn start(
    settings: &Settings,
    sides: &[Arc<Side>; 2],
    counts: [usize; WORKLOADS.len()],
    stop: &watch::Receiver<bool>,
) -> JoinSet<()> {
    let servers = Arc::new(Servers::new(settings));
    // The seeds of all processes differ.
    let seed = settings.seed ^ (u64::from(settings.process) << 32);
    let mut clients = JoinSet::new();
    for side in sides {
        for (workload, count) in counts.into_iter().enumerate() {
            for n in 0..count {
                let random = seed ^ (workload * 10_000 + n) as u64;
                let client = Client {
                    servers: servers.clone(),
                    side: side.clone(),
                    workload,
                    random: StdRng::seed_from_u64(random),
                    stop: stop.clone(),
                    connection: None,
                };
                clients.spawn(client.run());
            }
        }
    }
    clients
}

impl Client {
    async fn run(mut self) {
        while !*self.stop.borrow() {
            let worked = match WORKLOADS[self.workload].name {
                "counter" => self.count().await,
                "sql" => self.count_in_sql().await,
                "set" => self.add_to_set().await,
                "transfers" => self.transfer().await,
                "repeated" => self.repeat().await,
                "queue" => self.wait_in_queue().await,
                "stream" => self.stream().await,
                "sql stream" => self.stream_in_sql().await,
                name => unreachable!("{name}"),
            };
            if worked.is_none() {
                self.pause(Duration::from_millis(50)).await;
            }
        }
    }

    /// Waits for this time, or until the end of the run.
    async fn pause(&mut self, length: Duration) {
        let mut stop = self.stop.clone();
        tokio::select! {
            () = sleep(length) => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    }

    /// Pauses for at most `at_most_ms`. With the probability `pauses`, pauses for longer than a
    /// lease lasts.
    async fn think(&mut self, at_most_ms: u64, pauses: f64) {
        let length = match self.random.random_bool(pauses) {
            true => PAUSE,
            false => Duration::from_millis(self.random.random_range(0..=at_most_ms)),
        };
        self.pause(length).await;
    }

    /// Chooses a resource of the workload.
    fn choose(&mut self) -> usize {
        let (first, last) = WORKLOADS[self.workload].resources;
        self.random.random_range(first..last)
    }

    fn choose_service(&mut self) -> usize {
        self.random.random_range(0..self.servers.leases.len())
    }

    fn resource(&self, number: usize) -> Resource {
        Resource::new(&self.side.names[number]).unwrap()
    }

    fn new_entry(&self) -> i64 {
        self.servers.entries.fetch_add(1, Relaxed)
    }
}
