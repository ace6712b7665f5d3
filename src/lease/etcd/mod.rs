//! Leases in etcd, over its own HTTP gateway: each step a transaction.
//!
//! 1. A lease is a key that ends with an etcd lease of its own, so etcd keeps its time. The key is put where there is
//!    none, and where nobody waits who came before.
//! 2. A token is `epoch * 1_000_000_000 + n`, where n counts the revisions of etcd since the clock of the partition
//!    was begun: the revision in which the lease's key was put, less that of the clock's. Nothing has to be counted.
//! 3. A clock is for one history: one cluster id, and one life of it, see [`life`]. A clock of another history, one that is
//!    missing, or has counted less far than this process has seen, grants nothing. A blank clock with a fresh
//!    incarnation is put in its place; an epoch is taken then, from [`Epochs`](crate::epochs::Epochs), and begins on
//!    that very clock or not at all; see [`epochs`].
//! 4. Every transaction that grants demands that the clock is the one that was judged, and its answer counts only
//!    where it comes from the clock's cluster.
//! 5. A lease counts only under the clock that it was granted under. One that a snapshot brought back is lost to its
//!    holder, and keeps its resource closed for the rest of its time.
//! 6. Whatever a request may have left behind hangs on an etcd lease that it has named itself: to revoke that ends it,
//!    also what is still under way.
//!
//! The line of waiters is a range of keys in the order in which they were made; see [`waiters`].

mod acquire;
mod builder;
mod clock;
mod endpoints;
mod epochs;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod gateway;
mod keys;
mod life;
mod line;
mod list;
mod look;
mod messages;
mod pending;
mod renew;
mod server;
mod service;
mod store;
mod stored;
mod waiters;

pub use self::{builder::EtcdLeasesBuilder, store::EtcdLeases};
