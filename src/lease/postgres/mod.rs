//! Leases in Postgres, beside the fence: each step one call of a function, which is a transaction of its own.
//!
//! 1. A resource has one row of leases, which is updated in place. A grant raises the fence in the same
//!    transaction, on the fence's own row: its token is above all that the fence has seen, and everyone older
//!    is stale when it is answered. Nothing has to be announced, and no epoch to be reported.
//! 2. A token is durable before it is answered, whatever `synchronous_commit` says. What makes none, a release
//!    or a renewal that keeps its token, does not wait for the disk.
//! 3. Of a lease id the server learns the SHA-256: no log of statements has the secret.
//!
//! The queue is a table. A transaction that ends a lease notifies the first in the queue, by NOTIFY; each process
//! listens on one connection of its own, see [`listener`].

mod functions;
mod listener;
mod store;

pub use self::store::{PostgresBackend, PostgresLeases};
