//! The examples as real processes.

mod caller;
mod inventory;
mod languages;
mod outbox;
mod stale_writers;
mod worker;
