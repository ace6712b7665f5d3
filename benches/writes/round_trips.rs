//! The number of round trips to Postgres per write, which is the same on every machine.

use std::{sync::atomic::Ordering::SeqCst, time::Duration};

use sqlx::postgres::PgPoolOptions;
use tower_fence::Fence;
use tower_fence_tests::proxy::Proxy;

use super::{
    Bench, DATABASE,
    apps::apps,
    client::Writer,
    path, router,
    support::{http, load, options::Window, report::Report, rounds::Outcome},
};

/// Time of a turn. Each write of the turn is counted.
const WINDOW: Window = Window {
    warm_up: Duration::ZERO,
    measured: Duration::from_millis(200),
};

/// Counts the round trips of each contender, with one connection to the service.
///
/// The service has a pool of its own behind a proxy, because the proxy would slow the other tables
/// down.
pub fn count(bench: &Bench, report: &mut Report) {
    let title = "Round trips to Postgres per write";
    if !bench.options.wants(title) {
        return;
    }
    let (proxy, counter) = bench.runtime.block_on(Proxy::counting(bench.server.addr()));
    let pool = PgPoolOptions::new()
        .max_connections(4)
        .test_before_acquire(bench.options.test_connections);
    let url = proxy.url(&bench.server.url(DATABASE));
    let pool = bench.runtime.block_on(pool.connect(&url));
    let pool = pool.expect("postgres answers");
    let apps = apps(&pool, &Fence::new(pool.clone()));
    let addr = http::serve(&bench.runtime, router(&apps));
    let before = bench.decrements();
    let mut rows = vec![["contender", "round trips"].map(str::to_owned).to_vec()];
    let mut outcomes = vec![];
    for app in &apps {
        // With ten resources, the first turn looks up each stale one in the database, and the
        // second turn refuses from memory.
        let skus = &Bench::skus(app.name, false)[..10];
        let writers = Writer::all(&path(app), app.carries, skus, 1);
        // The first turn prepares the statements.
        let (first, writers) = load::drive(addr, writers, WINDOW);
        let before = counter.load(SeqCst);
        let (second, _) = load::drive(addr, writers, WINDOW);
        let trips = (counter.load(SeqCst) - before) as f64 / second.done as f64;
        rows.push(vec![app.name.to_owned(), format!("{trips:.1}")]);
        outcomes.push(Outcome {
            name: app.name.to_owned(),
            samples: vec![first, second],
        });
    }
    bench.check(&before, &outcomes);
    report.table(title, &rows);
}
