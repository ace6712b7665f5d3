//! A run tests one lease store after the other, under clients and faults, and the checker judges
//! each.

use std::{
    path::Path,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use sqlx::{Connection, PgConnection};
use tokio::{
    sync::{Mutex, watch},
    time::sleep,
};

use crate::{
    checker::Verdict,
    clients::{self, PAIRS, Settings, Side, WORKLOADS, process::ClientProcess},
    faults::{self, Stage, Targets},
    history::{Failover, History, Recorder},
    plan::plan,
    servers::{
        database::Database,
        leases::{LeaseServers, STORES},
        services::Services,
    },
    summary::{Phase, Summary},
    support::pgbouncer::PgBouncer,
};

/// The options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    pub length: Duration,
    pub seed: u64,
    /// The only store of the run. If it is not set, all stores take turns.
    pub store: Option<&'static str>,
    /// A factor for the number of clients of each workload.
    pub clients: usize,
    /// Whether the run injects no faults, for comparison.
    pub calm: bool,
}

/// The maximum length of a phase with one store. A longer run visits each store several times.
const LONGEST_PHASE: Duration = Duration::from_secs(120);
/// The timeout within which all workloads must write again after the last fault.
const RECOVERY: Duration = Duration::from_secs(120);

/// Runs under faults for the length in the options. The start of the servers and the recovery of
/// the clients take several seconds more.
pub async fn run(options: Options) -> Summary {
    let stores: Vec<_> = match options.store {
        Some(store) => vec![store],
        None => STORES.to_vec(),
    };
    let mut rounds = 1;
    while options.length > LONGEST_PHASE * rounds * u32::try_from(stores.len()).unwrap() {
        rounds += 1;
    }
    let phases: Vec<_> = (0..rounds).flat_map(|_| stores.clone()).collect();
    let length = options.length / u32::try_from(phases.len()).unwrap();
    let (database, address) = Database::start().await;
    let pooler = PgBouncer::start(&database.url(&address)).await;
    let targets = Targets {
        database: Mutex::new(database),
        address,
        link: Mutex::new(()),
        pooler: Mutex::new(pooler),
    };
    let mut summary = Summary::new(&options);
    for (n, store) in phases.into_iter().enumerate() {
        let seed = options.seed.wrapping_add(n as u64);
        let phase = phase(&targets, &options, store, n, seed, length).await;
        println!("{phase}");
        summary.add(phase);
    }
    summary
}

async fn phase(
    targets: &Targets,
    options: &Options,
    store: &'static str,
    number: usize,
    seed: u64,
    length: Duration,
) -> Phase {
    let leases = LeaseServers::start(store).await;
    let url = targets.database.lock().await.url(&targets.address);
    let pooler = targets.pooler.lock().await.url();
    let services = Services::start(&url, &pooler, &leases).await;
    let settings = Settings {
        urls: services.urls(),
        database: url,
        store: store.into(),
        prefix: number.to_string(),
        seed,
        process: 0,
    };
    let sides = Side::both(&settings, |_| Recorder::default());
    let mut conn = targets.database.lock().await.connect().await;
    for side in &sides {
        for name in &side.names {
            side.tables.add(&mut conn, name).await.unwrap();
        }
    }
    let (stop, stopped) = watch::channel(false);
    let counts = WORKLOADS.map(|workload| workload.clients * options.clients);
    let clients = clients::start(&settings, &sides, counts, &stopped);
    let stage = Stage {
        targets,
        services,
        leases,
        clients: Mutex::new(ClientProcess::start(settings, &sides)),
    };
    let plan = match options.calm {
        true => vec![],
        false => plan(seed, store, length),
    };
    let faults = faults::happen(&stage, plan, length).await;
    let stuck = recover(&sides[0]).await;
    stop.send_replace(true);
    clients.join_all().await;
    stage.clients.into_inner().stop();
    // Ends all writers before the tables are read.
    drop((stage.services, stage.leases));
    let mut database = targets.database.lock().await;
    let failovers = std::mem::take(&mut database.failovers);
    let mut conn = database.connect().await;
    drop(database);
    let mut judge = async |side: &Side| {
        let whole = history(side, &failovers, &mut conn).await;
        let mut verdict = Verdict::of(&whole);
        verdict.search(&whole, seed);
        if side.is_fenced && !verdict.is_good() {
            keep(&whole, seed);
        }
        verdict
    };
    let verdicts = [judge(&sides[0]).await, judge(&sides[1]).await];
    Phase {
        store,
        seed,
        faults,
        verdicts,
        stuck,
        failovers: failovers.iter().filter(|failover| failover.loses).count(),
    }
}

/// Waits until each resource is written to again. Returns the workloads of the resources that were
/// not written to in time.
async fn recover(side: &Side) -> Vec<&'static str> {
    let done = || side.done.each_ref().map(|count| count.load(Relaxed));
    let (before, deadline) = (done(), Instant::now() + RECOVERY);
    loop {
        let now = done();
        let stuck = (0..now.len()).filter(|n| now[*n] == before[*n]);
        let stuck: Vec<_> = stuck.map(clients::workload_of).collect();
        if stuck.is_empty() || Instant::now() > deadline {
            return stuck;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Collects the operations of a side, and reads its tables.
async fn history(side: &Side, failovers: &[Failover], conn: &mut PgConnection) -> History {
    let mut tx = conn
        .begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ")
        .await
        .unwrap();
    History {
        operations: side.recorder.take(),
        failovers: failovers.to_vec(),
        states: side.tables.states(&mut tx, &side.names).await.unwrap(),
        log: side.tables.lines(&mut tx, &side.names).await.unwrap(),
        sums: PAIRS.to_vec(),
    }
}

/// Writes a history with a violation to a file, ordered by resource and time.
fn keep(history: &History, seed: u64) {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("under-faults-{seed}.txt"));
    let mut operations = history.operations.clone();
    operations.sort_by_key(|one| (one.resource, one.invoked));
    let operations = operations.iter().map(|one| format!("{one:?}\n"));
    let log = history.log.iter().map(|line| format!("{line:?}\n"));
    let failovers = history.failovers.iter().map(|one| format!("{one:?}\n"));
    let text: String = operations.chain(log).chain(failovers).collect();
    match std::fs::write(&path, text) {
        Ok(()) => println!("the history is in {}", path.display()),
        Err(error) => println!("the history could not be written: {error}"),
    }
}
