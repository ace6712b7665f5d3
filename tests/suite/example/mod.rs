//! The examples as real processes.

mod caller;
mod inventory;
mod languages;
mod stale_writers;
mod worker;
