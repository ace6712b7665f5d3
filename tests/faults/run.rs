//! A run: one lease store after the other under clients and faults, and what the checker finds in the end.

use std::{
    path::Path,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use sqlx::{Connection, PgConnection};
use tokio::{
    sync::{Mutex, watch},
    task::JoinSet,
    time::sleep,
};

use crate::{
    checker::Verdict,
    clients::{self, PAIRS, Servers, Side, WORKLOADS},
    faults::{self, Stage, Targets},
    history::{History, Loss, Recorder},
    plan::{Planned, plan},
    servers::{
        database::Database,
        leases::{LeaseServers, STORES},
        pgbouncer::PgBouncer,
        services::{Services, Settings},
    },
    summary::{Phase, Summary},
};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    pub length: Duration,
    pub seed: u64,
    /// All of them in turn, where none is named.
    pub store: Option<&'static str>,
    /// How many there are of each client.
    pub clients: usize,
    /// Without faults, to compare.
    pub calm: bool,
}

/// No part of a run lasts longer than this, so that stores and servers take turns.
const LONGEST_PHASE: Duration = Duration::from_secs(120);
/// How long clients may need to go on when all faults are over.
const RECOVERY: Duration = Duration::from_secs(120);

/// Runs for so long under faults, with some seconds more for servers to start and for clients to recover.
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
    let targets = Arc::new(Targets {
        database: Mutex::new(database),
        address,
        pooler: Mutex::new(pooler),
    });
    println!("seed {}", options.seed);
    let mut summary = Summary::new(&options);
    for (n, store) in phases.into_iter().enumerate() {
        let seed = options.seed.wrapping_add(n as u64);
        let plan = match options.calm {
            true => vec![Planned::nothing(length)],
            false => plan(seed, store, length),
        };
        let phase = phase(&targets, store, n, options.clients, seed, plan).await;
        println!("{phase}");
        summary.add(phase);
    }
    summary
}

async fn phase(
    targets: &Arc<Targets>,
    store: &'static str,
    number: usize,
    times: usize,
    seed: u64,
    plan: Vec<Planned>,
) -> Phase {
    let began = Instant::now();
    let leases = LeaseServers::start(store).await;
    let url = targets.database.lock().await.url(&targets.address);
    let settings = Settings {
        pooled: targets.pooler.lock().await.url(),
        database: url.clone(),
        store,
        store_urls: leases.urls(),
    };
    let services = Services::start(&settings).await;
    let servers = Arc::new(Servers::new(services.urls(), url, store));
    let sides =
        [true, false].map(|is_fenced| Arc::new(Side::new(is_fenced, &format!("{number}"), began)));
    let mut conn = targets.database.lock().await.connect().await;
    for side in &sides {
        for name in &side.names {
            side.tables.add(&mut conn, name).await.unwrap();
        }
    }
    let stage = Arc::new(Stage {
        targets: targets.clone(),
        services,
        leases,
        clock: Recorder::new(began),
        losses: Mutex::default(),
    });
    let (stop, stopped) = watch::channel(false);
    let mut clients = JoinSet::new();
    for side in &sides {
        for task in clients::start(&servers, side, times, seed, &stopped) {
            clients.spawn(task);
        }
    }
    let faults = faults::happen(&stage, plan).await;
    let stuck = recover(&sides[0]).await;
    stop.send_replace(true);
    while let Some(client) = clients.join_next().await {
        client.expect("a client has failed");
    }
    let losses = stage.losses.lock().await.clone();
    // Nothing is written any more.
    drop(stage);
    let mut conn = targets.database.lock().await.connect().await;
    let [fenced, unfenced] = sides;
    let whole = history(&fenced, &losses, &mut conn).await;
    let fenced = Verdict::of(&whole);
    if !fenced.is_good() {
        keep(&whole, seed);
    }
    let unfenced = Verdict::of(&history(&unfenced, &losses, &mut conn).await);
    Phase {
        store,
        seed,
        faults,
        fenced,
        unfenced,
        stuck,
        losses: losses.len(),
    }
}

/// Waits until each workload goes on; which of them do not.
async fn recover(side: &Side) -> Vec<&'static str> {
    let answered = || side.answered.each_ref().map(|count| count.load(Relaxed));
    let (before, deadline) = (answered(), Instant::now() + RECOVERY);
    loop {
        let now = answered();
        let stuck = (0..now.len()).filter(|n| now[*n] == before[*n]);
        let stuck: Vec<_> = stuck.map(|n| WORKLOADS[n].name).collect();
        if stuck.is_empty() || Instant::now() > deadline {
            return stuck;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// What was done, and what is there.
async fn history(side: &Side, losses: &[Loss], conn: &mut PgConnection) -> History {
    let mut tx = conn
        .begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ")
        .await
        .unwrap();
    History {
        operations: side.recorder.take(),
        losses: losses.to_vec(),
        states: side.tables.states(&mut tx, &side.names).await.unwrap(),
        log: side.tables.lines(&mut tx, &side.names).await.unwrap(),
        sums: PAIRS.to_vec(),
    }
}

/// Leaves a bad history for whoever looks for the cause, by resource and time.
fn keep(history: &History, seed: u64) {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("under-faults-{seed}.txt"));
    let mut operations = history.operations.clone();
    operations.sort_by_key(|one| (one.resource, one.invoked));
    let operations = operations.iter().map(|one| format!("{one:?}\n"));
    let log = history.log.iter().map(|line| format!("{line:?}\n"));
    let losses = history.losses.iter().map(|loss| format!("{loss:?}\n"));
    let text: String = operations.chain(log).chain(losses).collect();
    match std::fs::write(&path, text) {
        Ok(()) => println!("the history is in {}", path.display()),
        Err(error) => println!("the history could not be written: {error}"),
    }
}
