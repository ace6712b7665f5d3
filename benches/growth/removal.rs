//! The removal of idle rows: its speed, and its cost for concurrent writes to other rows.

use std::{
    cell::{Cell, RefCell},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use sqlx::{PgPool, Postgres};
use tokio::runtime::Runtime;
use tower_fence::Fence;

use super::{
    statements::{Partitions, WITH_FLOOR},
    support::{
        options::Options,
        postgres::PostgresServer,
        report::Report,
        rounds::{self, Contender, median},
    },
    table::Table,
};

const BASELINE: &str = "alone";

/// Number of rows that are written to during a removal.
const ROWS: usize = 1_000;

pub fn race_all(
    runtime: &Runtime,
    server: &PostgresServer,
    options: &Options,
    report: &mut Report,
) {
    let to_known = "Writes during a removal, 16 connections";
    let first = "First writes during a removal, 16 connections";
    if ![to_known, first].iter().any(|title| options.wants(title)) {
        return;
    }
    let mut table = runtime.block_on(Table::migrated(server, "removal", options));
    runtime.block_on(table.fill(ROWS));
    let idle = if options.quick { 100_000 } else { 1_000_000 };
    let removal = Removal::new(runtime, &table, idle);
    let mut rates = vec![["removal", "rows per second"].map(str::to_owned).to_vec()];
    let mut tell = |beside: &str, of_rounds: Vec<f64>| {
        // `--only` may have excluded the contender.
        if of_rounds.is_empty() {
            return;
        }
        rates.push(vec![beside.to_owned(), format!("{:.0}", median(of_rounds))]);
    };
    let alone = (0..options.rounds).map(|_| {
        removal
            .beside(|| std::thread::sleep(options.window.measured))
            .1
    });
    tell("alone", alone.collect());
    for (title, pgbench) in [
        (to_known, WITH_FLOOR.writes(server, &table, ROWS)),
        (
            first,
            WITH_FLOOR.first_writes(server, &table, Partitions::All),
        ),
    ] {
        if !options.wants(title) {
            continue;
        }
        let of_rounds = RefCell::new(vec![]);
        let alone = Contender::new(BASELINE, |window| pgbench.run(window));
        let beside = Contender::new("during a removal", |window| {
            let (sample, rate) = removal.beside(|| pgbench.run(window));
            of_rounds.borrow_mut().push(rate);
            sample
        });
        let outcomes = rounds::run(title, BASELINE, vec![alone, beside], options);
        report.contenders(title, BASELINE, &outcomes);
        tell(title, of_rounds.into_inner());
    }
    report.table(&format!("Removal of {idle} idle rows"), &rates);
}

/// A removal of idle rows, while other rows are written to.
struct Removal<'a> {
    runtime: &'a Runtime,
    pool: PgPool,
    idle: u64,
    /// The number of rows that were created.
    made: Cell<u64>,
    removed: Cell<u64>,
}

impl<'a> Removal<'a> {
    fn new(runtime: &'a Runtime, table: &Table, idle: u64) -> Self {
        Self {
            runtime,
            pool: runtime.block_on(table.pool()),
            idle,
            made: Cell::new(0),
            removed: Cell::new(0),
        }
    }

    /// Removes rows while `work` runs, and returns the removed rows per second.
    fn beside<T>(&self, work: impl FnOnce() -> T) -> (T, f64) {
        self.runtime.block_on(self.refill());
        let done = Arc::new(AtomicBool::new(false));
        let fence = Fence::new(self.pool.clone());
        let began = Instant::now();
        let removal = self.runtime.spawn(remove(fence, Arc::clone(&done)));
        let result = work();
        done.store(true, Relaxed);
        let removed = self.runtime.block_on(removal).expect("rows were removed");
        let rate = removed as f64 / began.elapsed().as_secs_f64();
        self.removed.set(self.removed.get() + removed);
        assert!(
            removed < self.idle,
            "the idle rows did not last for the whole window"
        );
        (result, rate)
    }

    /// Restores the number of idle rows.
    async fn refill(&self) {
        let from = self.made.get();
        let to = self.removed.get() + self.idle;
        sqlx::query(
            "INSERT INTO tower_fence.resources (resource, max_token, updated_at, partition, history) \
             SELECT name, 1, now() - interval '1 day', tower_fence.partition_of(name), \
                 tower_fence.current_history() \
             FROM (SELECT 'idle-' || n AS name FROM generate_series($1, $2 - 1) n) AS names",
        )
        .bind(from.cast_signed())
        .bind(to.cast_signed())
        .execute(&self.pool)
        .await
        .expect("idle rows");
        self.made.set(to);
        let vacuumed = sqlx::raw_sql("VACUUM ANALYZE tower_fence.resources");
        vacuumed.execute(&self.pool).await.expect("it was vacuumed");
    }
}

async fn remove(fence: Fence<Postgres>, done: Arc<AtomicBool>) -> u64 {
    const HOUR: Duration = Duration::from_secs(60 * 60);
    let mut removed = 0;
    while !done.load(Relaxed) {
        removed += fence.remove_idle(HOUR, 1_000).await.expect("it is removed");
    }
    removed
}
