//! Leases in Redis. Each step is one Lua script.
//!
//! Resources are hashed into 256 partitions. A partition has one token counter (the key `clock`)
//! with the fields `{source, history, incarnation, epoch, n}`, and one key per held lease, all
//! under one hash tag. A grant increments `n`. There is no counter per resource, so apart from the
//! 256 counters, memory is used only for held leases and for waiters.
//!
//! 1. A token is `epoch * 1_000_000_000 + n`. An epoch belongs to one replication id of one server.
//!    The replication id is the `master_replid`, which scripts read with INFO. It changes at each
//!    restart, at each promotion of a replica, when the first replica connects, and when the server
//!    frees its replication backlog.
//! 2. The script grants nothing if the counter is missing (FLUSHALL, eviction) or belongs to
//!    another replication id (a restart, a failover, an old snapshot). It also grants nothing if
//!    the counter is lower than the highest value that the issuer has seen. Instead, the script
//!    leaves a blank counter with a new incarnation. The new epoch comes from
//!    [`Epochs`](crate::epochs::Epochs), outside of Redis. Its tokens are higher than all earlier
//!    ones, and the epoch begins on exactly that counter or not at all.
//! 3. A counter that belongs to another source of epochs is refused, because tokens of two sources
//!    cannot be compared.
//! 4. A lease stores the counter's value at its grant, and is valid only while the counter has the
//!    same epoch and is at least as high. If a lease that was restored from an earlier copy is
//!    invalid, its holder has lost it, but the resource stays blocked for the rest of the TTL.
//! 5. Redis stores only a part of the SHA-256 of a lease id. A client that can read this part can
//!    neither renew nor release the lease.
//!
//! The queue is in Redis; see [`listener`].

mod answer;
mod builder;
mod check;
mod connection;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod list;
mod listener;
mod script;
mod scripts;
mod server;
mod source;
mod store;

pub use self::{
    builder::RedisLeasesBuilder,
    store::{RedisBackend, RedisLeases},
};
