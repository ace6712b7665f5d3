//! One hot lock: how long it takes from a release to the grant of the next in line, and what that
//! costs Redis.

use std::{
    cell::RefCell,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use hdrhistogram::Histogram;
use tokio::time::Instant;

use crate::{
    clients::{Etcd, Issuer, Session, Watch},
    contenders::{OURS, TTL, USUAL},
    over_http,
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

/// What all who want the lock share: when it was released last.
#[derive(Clone)]
struct Baton(Arc<Mutex<Passed>>);

struct Passed {
    released: Option<Instant>,
    window: Window,
    /// From the first grant on.
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
        self.0.lock().expect("nobody panics with it")
    }

    /// The latencies of the hand-offs in place of those of whole operations.
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

/// Asks again and again: the usual lock has no line.
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
        // Otherwise it would be the first to find the lock free, again and again.
        self.lock.pause().await;
        Outcome::Done
    }
}

/// What the turns of a contender cost Redis.
#[derive(Default)]
struct Cost {
    hand_offs: u64,
    /// As clients send them.
    sent: u64,
    /// With those that scripts call.
    all: u64,
}

pub fn race(
    store: &Store,
    etcd: Option<&Program>,
    waiters: usize,
    options: &Options,
    report: &mut Report,
) -> Vec<Vec<String>> {
    let title = format!("Hand-offs of one lock, waiters: {waiters}");
    if !options.wants(&title) {
        return vec![];
    }
    let addr = over_http::serve(store, "hand-off");
    let hot = || vec!["hot".to_owned()];
    let count = |cost: &RefCell<Cost>, commands: &[&str], turn: &dyn Fn() -> Sample| {
        let sent = || commands.iter().map(|name| store.calls(name)).sum::<u64>();
        let all = || store.info("stats", "total_commands_processed");
        let (sent_before, all_before) = (sent(), all());
        let sample = turn();
        let mut cost = cost.borrow_mut();
        cost.hand_offs += sample.done;
        cost.sent += sent() - sent_before;
        // Without the two that ask for it.
        cost.all += all() - all_before - 2;
        sample
    };
    let (our_cost, usual_cost) = (RefCell::default(), RefCell::default());
    let mut contenders = vec![
        Contender::new(OURS, |window| {
            count(&our_cost, &["evalsha"], &|| {
                let baton = Baton::new(window);
                let clients = (0..=waiters).map(|_| Issuer::new(hot(), baton.clone()));
                let (sample, _) = load::drive(addr, clients.collect(), window);
                baton.into_sample(sample)
            })
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
    if let Some(etcd) = etcd {
        contenders.push(Contender::new("etcd", |window| {
            let baton = Baton::new(window);
            let client = |_| Etcd::new(&hot(), Session::Kept, baton.clone());
            let (sample, _) = load::drive(etcd.addr, (0..=waiters).map(client).collect(), window);
            baton.into_sample(sample)
        }));
    }
    // In that time all of them get in line.
    let joining = Duration::from_millis(2) * waiters as u32;
    let mut options = options.clone();
    options.window.warm_up += joining;
    options.window.measured *= 3;
    let outcomes = rounds::run(&title, OURS, contenders, &options);
    store.assert_all_free();
    report.contenders(&title, OURS, &outcomes);
    let costs = [(OURS, our_cost), (USUAL, usual_cost)].map(|(name, cost)| {
        let cost = cost.into_inner();
        let each = |commands: u64| format!("{:.1}", commands as f64 / cost.hand_offs as f64);
        vec![
            format!("{name}, waiters: {waiters}"),
            each(cost.sent),
            each(cost.all),
        ]
    });
    costs.into()
}
