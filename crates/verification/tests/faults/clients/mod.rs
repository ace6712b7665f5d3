//! The clients, modelled on Jepsen's tests of etcd's locks. Each client acquires a lease, reads,
//! pauses, writes, and starts again. Each workload runs with the fence and without it.

mod call;
mod counter;
pub mod process;
mod queue;
mod repeated;
mod set;
mod sql;
mod stream;
mod transfers;

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{sync::watch, time::sleep};
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

/// A workload: its name, the range of its resources, and the number of its clients.
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

/// All workloads.
pub const WORKLOADS: [Workload; 8] = [
    Workload {
        name: "counter",
        resources: (0, 6),
        clients: 4,
    },
    Workload {
        name: "sql",
        resources: (4, 8),
        clients: 3,
    },
    Workload {
        name: "set",
        resources: (8, 12),
        clients: 4,
    },
    Workload {
        name: "transfers",
        resources: (12, 16),
        clients: 3,
    },
    Workload {
        name: "repeated",
        resources: (16, 20),
        clients: 3,
    },
    Workload {
        name: "queue",
        resources: (20, 22),
        clients: 4,
    },
    Workload {
        name: "stream",
        resources: (22, 25),
        clients: 2,
    },
    Workload {
        name: "sql stream",
        resources: (25, 28),
        clients: 2,
    },
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
    pub fn new(is_fenced: bool, prefix: &str, recorder: Recorder) -> Self {
        let side = if is_fenced { "fenced" } else { "unfenced" };
        Self {
            tables: if is_fenced { FENCED } else { UNFENCED },
            is_fenced,
            names: (0..RESOURCES)
                .map(|n| format!("{prefix}-{side}-{n}"))
                .collect(),
            recorder,
            done: [const { AtomicU64::new(0) }; RESOURCES],
        }
    }
}

/// The servers, as clients reach them.
pub struct Servers {
    /// The services.
    pub urls: Vec<String>,
    pub leases: Vec<HttpLeases>,
    pub http: reqwest::Client,
    pub database: String,
    /// Whether the leases are in Postgres, so that clients can acquire them in SQL.
    pub leases_in_sql: bool,
    pub entries: AtomicI64,
}

impl Servers {
    pub fn new(urls: Vec<String>, database: String, store: &str) -> Self {
        let leases = urls.iter().map(|url| {
            let leases = HttpLeases::new(&format!("{url}/locks")).unwrap();
            leases.answer_timeout(PATIENCE)
        });
        Self {
            leases: leases.collect(),
            urls,
            http: reqwest::Client::builder()
                .timeout(PATIENCE)
                .build()
                .unwrap(),
            database,
            leases_in_sql: store == "postgres",
            entries: AtomicI64::new(1),
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
}

/// Starts the clients of one side. `counts` is the number of clients of each workload.
pub fn start(
    servers: &Arc<Servers>,
    side: &Arc<Side>,
    counts: [usize; WORKLOADS.len()],
    seed: u64,
    stop: &watch::Receiver<bool>,
) -> Vec<impl Future<Output = ()> + Send + use<>> {
    let mut tasks = vec![];
    for (workload, count) in counts.into_iter().enumerate() {
        for n in 0..count {
            let random = seed ^ (workload * 10_000 + n) as u64;
            let client = Client {
                servers: servers.clone(),
                side: side.clone(),
                workload,
                random: StdRng::seed_from_u64(random),
                stop: stop.clone(),
            };
            tasks.push(client.run());
        }
    }
    tasks
}

impl Client {
    async fn run(mut self) {
        let mut connection = None;
        while !*self.stop.borrow() {
            let worked = match WORKLOADS[self.workload].name {
                "counter" => self.count().await,
                "sql" => self.count_in_sql(&mut connection).await,
                "set" => self.add_to_set().await,
                "transfers" => self.transfer().await,
                "repeated" => self.repeat().await,
                "queue" => self.wait_in_queue().await,
                "stream" => self.stream().await,
                "sql stream" => self.stream_in_sql(&mut connection).await,
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
        let range: Range<usize> = first..last;
        self.random.random_range(range)
    }

    fn choose_service(&mut self) -> usize {
        self.random.random_range(0..self.servers.urls.len())
    }

    fn resource(&self, number: usize) -> Resource {
        Resource::new(&self.side.names[number]).unwrap()
    }

    fn new_entry(&self) -> i64 {
        self.servers.entries.fetch_add(1, Relaxed)
    }
}
