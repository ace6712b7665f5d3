//! What the benches share.

pub mod cpu;
pub mod figures;
pub mod http;
pub mod load;
pub mod machine;
pub mod options;
pub mod pgbench;
pub mod plot;
// The tests use these two, too.
#[path = "../../tests/suite/support/ports.rs"]
pub mod ports;
#[path = "../../tests/suite/support/postgres.rs"]
pub mod postgres;
pub mod program;
pub mod report;
pub mod rounds;
pub mod tasks;
