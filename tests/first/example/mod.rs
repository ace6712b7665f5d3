//! The examples as real processes.

mod caller;
mod inventory;
mod stale_writers;
mod worker;
