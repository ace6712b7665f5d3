//! A large table in one piece and in partitions by hash: what is written, what is new, and what a vacuum and a
//! removal take.

use std::time::{Duration, Instant};

use sqlx::PgPool;
use tokio::runtime::Runtime;
use tower_fence::Fence;

use super::{
    statements::{Partitions, WITH_FLOOR},
    support::{
        options::Options,
        postgres::PostgresServer,
        report::Report,
        rounds::{self, Contender},
    },
    table::{State, Table},
};

const BASELINE: &str = "plain";
const PARTS: i32 = 16;
const PARTITIONED: &str = "16 partitions";

/// How many idle rows are removed.
const REMOVED: u64 = 50_000;

pub fn race_all(
    runtime: &Runtime,
    server: &PostgresServer,
    options: &Options,
    report: &mut Report,
) {
    let usual = if options.quick { 1_000_000 } else { 10_000_000 };
    let rows = options.resources.unwrap_or(usual);
    let to_known = format!("Writes to {rows} rows in one piece and in partitions, 16 connections");
    let first = format!("First writes beside {rows} rows in one piece and in partitions");
    if ![&to_known, &first].iter().any(|title| options.wants(title)) {
        return;
    }
    let mut numbers = vec![["table", "what", "seconds"].map(str::to_owned).to_vec()];
    let mut tables = [BASELINE, PARTITIONED].map(|name| {
        eprintln!("filling {rows} rows: {name}");
        let database = name.replace(' ', "_").replace("16", "hash");
        let mut table = runtime.block_on(Table::migrated(server, &database, options));
        let is_divided = name == PARTITIONED;
        // A table of any size may leave no room for the copy of all its rows.
        let beforehand = is_divided && options.resources.is_some();
        if beforehand {
            runtime.block_on(divide(&table));
        }
        let began = Instant::now();
        runtime.block_on(table.fill_all_partitions(rows));
        numbers.push(told(name, "filling it", began.elapsed()));
        if is_divided && !beforehand {
            let took = runtime.block_on(divide(&table));
            numbers.push(told(name, "fence_partition_resources", took));
        }
        table
    });
    let known = [BASELINE, PARTITIONED].into_iter().zip(&tables);
    let known = known.map(|(name, table)| {
        let pgbench = WITH_FLOOR.writes(server, table, rows);
        Contender::new(name, move |window| pgbench.run(window))
    });
    let outcomes = rounds::run(&to_known, BASELINE, known.collect(), options);
    report.contenders(&to_known, BASELINE, &outcomes);
    let new = [BASELINE, PARTITIONED].into_iter().zip(&tables);
    let new = new.map(|(name, table)| {
        let pgbench = WITH_FLOOR.first_writes(server, table, Partitions::All);
        Contender::new(name, move |window| pgbench.run(window))
    });
    let outcomes = rounds::run(&first, BASELINE, new.collect(), options);
    report.contenders(&first, BASELINE, &outcomes);
    for (outcome, table) in outcomes.iter().zip(&mut tables) {
        table.rows += outcome.done() as usize;
    }
    let mut states = vec![State::columns()];
    for (name, table) in [BASELINE, PARTITIONED].into_iter().zip(&tables) {
        states.push(runtime.block_on(table.state()).row(name));
        runtime.block_on(table.check([].into_iter()));
    }
    report.table(
        "After these writes, in one piece and in partitions",
        &states,
    );
    for (name, table) in [BASELINE, PARTITIONED].into_iter().zip(&tables) {
        let pool = runtime.block_on(table.pool());
        let vacuum = runtime.block_on(timed(&pool, "VACUUM fence_resources"));
        numbers.push(told(name, "VACUUM", vacuum));
        let removal = runtime.block_on(remove(&pool));
        numbers.push(told(name, &format!("removal of {REMOVED} rows"), removal));
        runtime.block_on(pool.close());
    }
    report.table(
        "Work on the whole table, in one piece and in partitions",
        &numbers,
    );
}

fn told(name: &str, what: &str, took: Duration) -> Vec<String> {
    vec![
        name.into(),
        what.into(),
        format!("{:.2}", took.as_secs_f64()),
    ]
}

async fn divide(table: &Table) -> Duration {
    let pool = table.pool().await;
    let took = timed(&pool, &format!("SELECT fence_partition_resources({PARTS})")).await;
    timed(&pool, "VACUUM ANALYZE fence_resources").await;
    pool.close().await;
    took
}

async fn timed(pool: &PgPool, sql: &str) -> Duration {
    let began = Instant::now();
    let done = sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(pool).await;
    done.expect("it is done");
    began.elapsed()
}

/// Removes rows, all of which count as idle.
async fn remove(pool: &PgPool) -> Duration {
    let fence = Fence::new(pool.clone());
    let began = Instant::now();
    let mut removed = 0;
    while removed < REMOVED {
        let batch = fence.remove_idle(Duration::ZERO, 10_000).await;
        removed += batch.expect("it is removed");
    }
    began.elapsed()
}
