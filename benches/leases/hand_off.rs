//! Hand-offs of one hot lock: the time from a release to the grant of the next waiter, and the cost
//! for the server.

use std::{
    cell::{RefCell, RefMut},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use hdrhistogram::Histogram;
use tokio::time::Instant;

use crate::{
    advisory::AdvisoryLock,
    clients::{Etcd, Issuer, Session, Watch},
    contenders::{ADVISORY, ETCD, IN_POSTGRES, IN_POSTGRES_REUSE, OURS, TTL, USUAL},
    over_http,
    postgres_store::PostgresStore,
    store::Store,
    support::{
        load,
        options::{Options, Window},
        program::Program,
        report::Report,
        rounds::{self, Contender, Sample, latencies},
        tasks::{self, Operation, Outcome},
    },
    usual::UsualLock,
};

/// The state that all clients of the lock share: the time of the last release.
#[derive(Clone)]
struct Baton(Arc<Mutex<Passed>>);

struct Passed {
    released: Option<Instant>,
    window: Window,
    /// The measured period, which begins with the first grant.
    measured: Option<Range<Instant>>,
    latencies: Histogram<u64>,
}

impl Baton {
    fn new(window: Window) -> Self {
        Self(Arc::new(Mutex::new(Passed {
            released: None,
            window,
            measured: None,
            latencies: latencies(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Passed> {
        self.0.lock().expect("no task panics with the lock")
    }

    /// Replaces the latencies of whole operations with the latencies of the hand-offs.
    fn into_sample(self, sample: Sample) -> Sample {
        Sample {
            latencies: self.lock().latencies.clone(),
            ..sample
        }
    }
}

impl Watch for Baton {
    const WAIT_MS: u64 = 60_000;

    fn granted(&self) {
        let now = Instant::now();
        let mut passed = self.lock();
        let window = passed.window;
        let measured = passed.measured.get_or_insert_with(|| {
            let from = now + window.warm_up;
            from..from + window.measured
        });
        let within = measured.contains(&now);
        if let Some(released) = passed.released.take()
            && within
        {
            let took = u64::try_from((now - released).as_nanos());
            passed.latencies.saturating_record(took.unwrap_or(u64::MAX));
        }
    }

    fn releases(&self) {
        self.lock().released = Some(Instant::now());
    }
}

/// A task that polls, because the usual lock has no queue.
struct Polling {
    lock: UsualLock,
    baton: Baton,
}

impl Operation for Polling {
    async fn run(&mut self) -> Outcome {
        let id = self.lock.lock("hot", TTL).await;
        self.baton.granted();
        self.baton.releases();
        self.lock.unlock("hot", id).await;
        // Without a pause, this task would acquire the lock again each time.
        self.lock.pause().await;
        Outcome::Done
    }
}

/// A task that waits in Postgres, or for a session of the pool.
struct ByHand {
    lock: AdvisoryLock,
    baton: Baton,
}

impl Operation for ByHand {
    async fn run(&mut self) -> Outcome {
        let held = self.lock.lock("hot").await;
        self.baton.granted();
        self.baton.releases();
        self.lock.unlock("hot", held).await;
        Outcome::Done
    }
}

/// The cost of a contender's turns for the server.
#[derive(Default)]
struct Cost {
    hand_offs: u64,
    /// The number of commands that clients sent to Redis or etcd, or of transactions in Postgres.
    sent: u64,
    /// The number of commands, including the commands that scripts called.
    all: u64,
}

pub fn race(
    store: &Store,
    postgres: &PostgresStore,
    etcd: Option<&Program>,
    waiters: usize,
    options: &Options,
    report: &mut Report,
) -> Vec<Vec<String>> {
    let title = format!("Hand-offs of one lock, waiters: {waiters}");
    if !options.wants(&title) {
        return vec![];
    }
    let hot = || vec!["hot".to_owned()];
    let over_http = |addr, window| {
        let baton = Baton::new(window);
        let clients = (0..=waiters).map(|_| Issuer::new(hot(), baton.clone()));
        let (sample, _) = load::drive(addr, clients.collect(), window);
        baton.into_sample(sample)
    };
    let in_redis = over_http::serve(store, store.leases("hand-off"));
    let count = |cost: &RefCell<Cost>, commands: &[&str], turn: &dyn Fn() -> Sample| {
        let sent = || commands.iter().map(|name| store.calls(name)).sum::<u64>();
        let all = || store.info("stats", "total_commands_processed");
        let (sent_before, all_before) = (sent(), all());
        let sample = turn();
        let mut cost = cost.borrow_mut();
        cost.hand_offs += sample.done;
        cost.sent += sent() - sent_before;
        // The two commands that read the count are subtracted.
        cost.all += all() - all_before - 2;
        sample
    };
    let (our_cost, usual_cost) = (RefCell::default(), RefCell::default());
    let mut contenders = vec![
        Contender::new(OURS, |window| {
            count(&our_cost, &["evalsha"], &|| over_http(in_redis, window))
        }),
        Contender::new(format!("{USUAL}, in process"), |window| {
            count(&usual_cost, &["evalsha", "set"], &|| {
                let (lock, baton) = (store.usual(), Baton::new(window));
                let polling = (0..=waiters).map(|_| Polling {
                    lock: lock.clone(),
                    baton: baton.clone(),
                });
                let running = tasks::run(polling.collect(), window);
                let (sample, _) = store.runtime.block_on(running);
                baton.into_sample(sample)
            })
        }),
    ];
    let in_postgres = postgres.both();
    let their_costs = in_postgres.each_ref().map(|_| RefCell::default());
    for ((name, leases), cost) in in_postgres.into_iter().zip(&their_costs) {
        let addr = over_http::serve(store, leases);
        contenders.push(Contender::new(name, move |window| {
            let before = postgres.transactions();
            let sample = over_http(addr, window);
            let mut cost: RefMut<'_, Cost> = cost.borrow_mut();
            cost.hand_offs += sample.done;
            cost.sent += postgres.transactions() - before;
            sample
        }));
    }
    contenders.push(Contender::new(
        format!("{ADVISORY}, in process"),
        |window| {
            let (lock, baton) = (postgres.advisory(), Baton::new(window));
            let by_hand = (0..=waiters).map(|_| ByHand {
                lock: lock.clone(),
                baton: baton.clone(),
            });
            let running = tasks::run(by_hand.collect(), window);
            let (sample, _) = store.runtime.block_on(running);
            baton.into_sample(sample)
        },
    ));
    if let Some(etcd) = etcd {
        contenders.push(Contender::new(ETCD, |window| {
            let baton = Baton::new(window);
            let client = |_| Etcd::new(&hot(), Session::Kept, baton.clone());
            let (sample, _) = load::drive(etcd.addr, (0..=waiters).map(client).collect(), window);
            baton.into_sample(sample)
        }));
    }
    // All waiters join the queue in this time.
    let joining = Duration::from_millis(2) * waiters as u32;
    let mut options = options.clone();
    options.window.warm_up += joining;
    options.window.measured *= 3;
    let granted_before = postgres.granted();
    let outcomes = rounds::run(&title, OURS, contenders, &options);
    store.assert_all_free();
    postgres.assert_all_free();
    postgres.assert_granted_since(granted_before, &outcomes);
    report.contenders(&title, OURS, &outcomes);
    let row = |name: &str, cost: RefCell<Cost>| {
        let cost = cost.into_inner();
        if cost.hand_offs == 0 {
            return None;
        }
        let each = |count: u64| format!("{:.1}", count as f64 / cost.hand_offs as f64);
        let of_scripts = match cost.all {
            0 => String::new(),
            all => each(all),
        };
        let name = format!("{name}, waiters: {waiters}");
        Some(vec![name, each(cost.sent), of_scripts])
    };
    let [plain, reusing] = their_costs;
    let costs = [
        row(OURS, our_cost),
        row(USUAL, usual_cost),
        row(IN_POSTGRES, plain),
        row(IN_POSTGRES_REUSE, reusing),
    ];
    costs.into_iter().flatten().collect()
}
