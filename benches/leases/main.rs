//! The cost of a lease, compared with other locks. See `benches/README.md`.

mod advisory;
mod clients;
mod contenders;
mod hand_off;
mod in_process;
mod memory;
mod over_http;
mod postgres_store;
mod quorum;
mod store;
mod usual;

use std::sync::Arc;

use tower_fence_benches as support;

use self::{
    postgres_store::PostgresStore,
    store::Store,
    support::{
        http, machine, options::Options, postgres::PostgresServer, program::Program, report::Report,
    },
};

fn main() {
    let options = Options::read();
    let runtime = Arc::new(http::runtime());
    let postgres = runtime.block_on(PostgresServer::start(&[]));
    let mut report = Report::new("leases", &options, machine::describe(&postgres.programs));
    let store = Store::start(Arc::clone(&runtime), &postgres);
    let in_postgres = PostgresStore::start(runtime, &postgres, &options);
    let etcd = Program::etcd();
    if etcd.is_none() {
        println!(
            "etcd is not installed, so its contenders are skipped (Debian: apt-get install etcd-server)"
        );
    }
    in_process::race(&store, &in_postgres, &options, &mut report);
    quorum::race(&store, &options, &mut report);
    over_http::race(&store, &in_postgres, etcd.as_ref(), &options, &mut report);
    // There are fewer rounds, because every waiter must get the lock once at the end of each turn.
    let fewer = Options {
        rounds: options.rounds.min(3),
        ..options.clone()
    };
    let mut costs = vec![
        ["", "sent or committed", "including those of scripts"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for waiters in [1, 10, 100, 1_000] {
        if files() < 2 * waiters + 200 {
            println!("skipping {waiters} waiters, which need more open files: ulimit -n 8192");
            continue;
        }
        let race = hand_off::race(
            &store,
            &in_postgres,
            etcd.as_ref(),
            waiters,
            &fewer,
            &mut report,
        );
        costs.extend(race);
    }
    if costs.len() > 1 {
        report.table(
            "Redis commands and Postgres transactions per hand-off",
            &costs,
        );
    }
    memory::measure(&store, &options, &mut report);
    report.finish();
}

/// Returns the number of files that this process may open.
fn files() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let limit = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"));
    let limit = limit.and_then(|limit| limit.split_whitespace().next()?.parse().ok());
    limit.unwrap_or(usize::MAX)
}
