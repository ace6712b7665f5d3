//! The first tier: every promise, on Postgres and on SQLite, with leases in memory, in Postgres and
//! in one Redis.

macro_rules! on_every_store {
    ($($name:ident),* $(,)?) => {
        crate::support::store::on_store!(in_memory: Memory, $($name),*);
        crate::support::store::on_store!(on_postgres: Postgres, $($name),*);
        crate::support::store::on_store!(on_redis: Redis, $($name),*);
    };
}

macro_rules! on_every_store_with_a_queue {
    ($($names:tt)*) => {
        on_every_store!($($names)*);
    };
}

mod client;
mod contract;
#[path = "../every_store/mod.rs"]
mod every_store;
mod example;
mod failures;
mod fence;
mod issuer;
mod layer;
mod lease;
mod manifest;
mod unsupported;
mod versions;
mod words;

#[macro_use]
extern crate tower_fence_tests as support;
