//! Leases in Redis, each step one Lua script.
//!
//! Resources hash into 256 partitions. A partition has one token counter (the key `clock`), `{source, history, incarnation,
//! epoch, n}`, and a key per held lease, all under one hash tag. A grant increments `n`; there is none
//! per resource, so memory is held for held leases and for waiters.
//!
//! 1. A token is `epoch * 1_000_000_000 + n`, and an epoch is tied to one history of one server:
//!    `master_replid`, read inside the script, which changes at each restart and at each promotion of
//!    a replica.
//! 2. If the counter is missing (FLUSHALL, eviction), belongs to another history (a restart, a
//!    failover, an old snapshot), or has counted less far than the issuer remembers, the script
//!    grants nothing and leaves a blank counter with a fresh incarnation. A new epoch comes from
//!    [`Epochs`](crate::epochs::Epochs), outside of Redis, outranks all that was granted before, and begins on that very
//!    counter or not at all.
//! 3. A counter that names another source of epochs is refused: tokens of two sources say nothing
//!    about each other.
//! 4. A lease keeps how far the counter had counted at its grant, and counts only under a counter of the
//!    same epoch that has counted as far. One that came back from the past is lost to its holder, and keeps its
//!    resource blocked for the rest of its time.
//!
//! 5. Of a lease id Redis has a part of its SHA-256, so that whoever reads there can neither renew nor release.
//!
//! The queue is in Redis. The script that releases grants to the first in the queue, token included,
//! and publishes that to its issuer; see [`listener`].

mod answer;
mod builder;
mod check;
mod connection;
mod credentials;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod list;
mod listener;
mod scripts;
mod server;
mod store;

pub use self::{
    builder::RedisLeasesBuilder,
    store::{RedisBackend, RedisLeases},
};
