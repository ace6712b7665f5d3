#![doc = include_str!("../README.md")]
//!
//! # How it works
//!
//! Each node has a token counter for each partition, and a key for each lease that it has granted.
//! When an attempt takes a key, the node writes a stamp into it. The stamp consists of the
//! replication id of the node (`master_replid`, called `history` in the code), the incarnation of
//! the counter, and a serial number.
//!
//! 1. To grant a lease, the issuer runs one script on all nodes. The script *takes* the key. If the
//!    key does not exist and the counter has an epoch, the script also *seals* a token in the key.
//!    The token is the number that the issuer proposes, if it is above the counter, and otherwise
//!    the next number. If a majority of the nodes seals the same token, that token is granted.
//! 2. Otherwise the issuer chooses the token above the highest counter of a majority, and a second
//!    script seals it on those nodes. A node refuses the script if the stamp of the key, the
//!    replication id or the incarnation of the counter has changed.
//! 3. A counter has no epoch if it is missing, or if it was written under another replication id
//!    because the node has restarted. If a grant needs an epoch, the issuer takes it from
//!    [`Epochs`](tower_fence::epochs::Epochs) at that moment, never in advance.
//! 4. A counter never decreases, and no script lowers the token of a key.
//! 5. A repeated request takes the key again, under a newer attempt. The nodes refuse late scripts
//!    of an older attempt, and the issuer ignores late replies.
//! 6. A renewal and a release contain the granted token and its attempt. The issuer that granted
//!    the lease has both in memory. Another issuer first reads them from a majority.
//! 7. If a request fails, the issuer deletes the keys of the request that have no token, and those
//!    whose token the request itself has sealed.
//! 8. A node has no replicas. A replica that replaced the node could lack its latest leases and
//!    counts.
//!
//! For each rule, the [verification](tower_fence::proof#a-quorum-of-redis-nodes) lists the failures
//! that it prevents.

mod answer;
mod answers;
mod attempt;
mod backend;
mod builder;
mod choice;
mod end;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod grant;
mod health;
mod list;
mod node;
mod nodes;
mod renew;
mod scripts;
mod server;

pub use self::{
    backend::{QuorumBackend, QuorumLeases},
    builder::QuorumLeasesBuilder,
};
