//! The cost of the fence with a large table, and after many writes.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use axum::{Router, http::StatusCode, routing::post};
use sqlx::PgPool;
use tokio::runtime::Runtime;
use tower_fence::{Fence, FenceLayer, PathParam, PgFencedTx};

use super::{
    CONNECTIONS,
    client::Writer,
    support::{
        http, load,
        options::{Options, Window},
        postgres::PostgresServer,
        report::Report,
        rounds::{self, Contender},
    },
    table::{State, Table},
};

const BASELINE: &str = "1000 rows";

pub fn race_all(
    runtime: &Runtime,
    server: &PostgresServer,
    options: &Options,
    report: &mut Report,
) {
    let fresh = "Writes to tables of different size, 16 connections";
    let after_checkpoint = "Writes right after a checkpoint";
    let seconds = if options.quick { 5 } else { 60 };
    let for_a_while = format!("Written for {seconds} s");
    let titles = [fresh, after_checkpoint, &for_a_while];
    if !titles.iter().any(|title| options.wants(title)) {
        return;
    }
    let largest = if options.quick { 1_000_000 } else { 10_000_000 };
    let tables = [1_000, 100_000, largest].map(|rows| {
        eprintln!("filling {rows} rows");
        let name = format!("rows_{rows}");
        let mut table = runtime.block_on(Table::migrated(server, &name, options));
        runtime.block_on(table.fill(rows));
        table
    });
    race(fresh, runtime, &tables, options, report);
    runtime.block_on(tables[0].checkpoint());
    race(after_checkpoint, runtime, &tables, options, report);
    if options.wants(&for_a_while) {
        written(&for_a_while, seconds, runtime, &tables[..2], report);
    }
}

/// Measures how a table changes while it is written to.
fn written(title: &str, seconds: u64, runtime: &Runtime, tables: &[Table], report: &mut Report) {
    let mut rows = vec![State::columns()];
    for table in tables {
        eprintln!("{} rows, written for {seconds} s", table.rows);
        rows.push(runtime.block_on(table.state()).row("before"));
        sustain(runtime, table, seconds);
        rows.push(runtime.block_on(table.state()).row("after"));
    }
    report.table(title, &rows);
}

/// Starts a server whose handler writes nothing itself.
fn serve(runtime: &Runtime, pool: &PgPool) -> SocketAddr {
    let layer = FenceLayer::new(Fence::new(pool.clone()), PathParam("resource"));
    let handler = post(async |_tx: PgFencedTx| StatusCode::NO_CONTENT);
    let app = Router::new().route("/{resource}", handler);
    http::serve(runtime, app.route_layer(layer))
}

fn race(title: &str, runtime: &Runtime, tables: &[Table], options: &Options, report: &mut Report) {
    if !options.wants(title) {
        return;
    }
    let (mut contenders, mut lasts, mut pools) = (vec![], vec![], vec![]);
    for table in tables {
        let pool = runtime.block_on(table.pool());
        let addr = serve(runtime, &pool);
        pools.push(pool);
        lasts.push(std::cell::RefCell::new(HashMap::new()));
        let writers = Writer::all(table.rows, CONNECTIONS);
        contenders.push((table, addr, writers));
    }
    let contenders = contenders.into_iter().zip(&lasts);
    let contenders = contenders.map(|((table, addr, mut writers), last)| {
        Contender::new(format!("{} rows", table.rows), move |window| {
            let (sample, given_back) = load::drive(addr, std::mem::take(&mut writers), window);
            writers = given_back;
            for writer in &mut writers {
                last.borrow_mut().extend(writer.last.drain());
            }
            sample
        })
    });
    let outcomes = rounds::run(title, BASELINE, contenders.collect(), options);
    for ((table, last), pool) in tables.iter().zip(lasts).zip(pools) {
        runtime.block_on(pool.close());
        runtime.block_on(table.check(last.into_inner().into_iter()));
    }
    report.contenders(title, BASELINE, &outcomes);
}

/// Writes to the table for this number of seconds.
fn sustain(runtime: &Runtime, table: &Table, seconds: u64) {
    let pool = runtime.block_on(table.pool());
    let addr = serve(runtime, &pool);
    let window = Window {
        warm_up: Duration::ZERO,
        measured: Duration::from_secs(seconds),
    };
    let (_, writers) = load::drive(addr, Writer::all(table.rows, CONNECTIONS), window);
    runtime.block_on(pool.close());
    let last = writers.into_iter().flat_map(|writer| writer.last);
    runtime.block_on(table.check(last));
}
