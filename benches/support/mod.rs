//! Code that the benches share.

pub mod cpu;
pub mod figures;
pub mod http;
pub mod latency;
pub mod load;
pub mod machine;
pub mod options;
pub mod pgbench;
pub mod program;
pub mod report;
pub mod rounds;
pub mod tasks;

pub use tower_fence_tests::{ports, postgres};
