//! Leases on a majority of Redis servers that know nothing of each other: Redlock, with fencing tokens.
//!
//! Each node has a clock for each partition, `{history, incarnation, serial, epoch, n}`, and a key for each lease that it
//! granted. What a node gave a lease when its key was set is the stamp: history, incarnation and serial.
//!
//! 1. A grant takes two scripts. The first one *takes* the key on all nodes, without a token, and answers stamps and
//!    clocks. The token is one above the highest clock of a majority, and the second script *seals* it on those
//!    nodes: only where the key still has that stamp, and the clock that history and incarnation. It is a grant where a
//!    majority has sealed.
//! 2. A clock that is missing, or was written under another history (the node was restarted), has no epoch. Where one
//!    of the majority has none, the epoch comes from [`Epochs`](crate::epochs::Epochs), and is taken then, never ahead.
//! 3. A clock never goes back: to seal makes it the higher of both.
//! 4. A repetition of a request takes the key again, under a newer attempt. What an older attempt sends late is refused,
//!    and no attempt chooses two tokens. Another token of a lease is above those that nodes have stored of it.
//! 5. A renewal counts the nodes that have the same token of the lease under their own history. It sets no key that is
//!    missing.
//! 6. What ends a lease deletes the very value that was found.
//! 7. A node stands alone. One with replicas may be replaced by a server that knows less, and two live servers behind
//!    one node have no cure.
//!
//! There is no line: who waits asks again, after a random pause.

mod answer;
mod attempt;
mod builder;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod grant;
mod list;
mod node;
mod nodes;
mod pauses;
mod pending;
mod renew;
mod scripts;
mod shared;
mod store;

pub use self::{builder::QuorumLeasesBuilder, store::QuorumLeases};
