//! Leases in Postgres, in the database of the fence. Each step is one call to an SQL function, in
//! its own transaction.
//!
//! 1. A resource has one row in the table of leases, which is updated in place. A grant raises the
//!    fence in the same transaction, in the resource's row of the fence. The token of the grant is
//!    higher than all tokens that the fence has seen, and all lower tokens are stale when the grant
//!    is returned. Neither announcements nor epochs are needed.
//! 2. A grant or a renewal is durable before it is returned, regardless of the value of
//!    `synchronous_commit`. A step that returns no token, such as a release, does not wait for the
//!    disk. If a crash undoes a release, the resource is blocked until the lease expires.
//! 3. The server receives only the SHA-256 of a lease id, so no statement log contains the secret.
//!
//! The queue is a table. A transaction that releases or breaks a lease notifies the first request
//! in the queue with NOTIFY. Each process listens on a separate connection; see [`listener`].

mod functions;
mod listener;
mod store;

pub use self::store::{PostgresBackend, PostgresLeases};
