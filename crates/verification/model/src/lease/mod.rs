//! Leases: what their tokens promise whatever is lost, and what the resource makes of them.
//!
//! Three worlds. In [`losses`] the lease store and the database lose things, and tokens are looked at as the store hands
//! them out. In [`last_word`] the store may hand out any token, and the resource decides. In [`line`] they wait
//! for a lease.

pub mod last_word;
pub mod line;
pub mod losses;
