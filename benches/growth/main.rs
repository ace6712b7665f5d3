//! The cost of the fence with a large table, after many writes, with new resources, and during
//! removals. See `benches/README.md`.

mod client;
mod first_writes;
mod removal;
mod sizes;
mod statements;
mod table;

use tower_fence_benches as support;

use self::support::{http, machine, options::Options, postgres::PostgresServer, report::Report};

const CONNECTIONS: usize = 16;

fn main() {
    let options = Options::read();
    let runtime = http::runtime();
    let settings = [
        "shared_buffers=2GB",
        "max_wal_size=8GB",
        "checkpoint_timeout=30min",
    ];
    let server = runtime.block_on(PostgresServer::start(&settings));
    let mut report = Report::new("growth", &options, machine::describe(&server.programs));
    sizes::race_all(&runtime, &server, &options, &mut report);
    first_writes::race_all(&runtime, &server, &options, &mut report);
    removal::race_all(&runtime, &server, &options, &mut report);
    report.finish();
}
