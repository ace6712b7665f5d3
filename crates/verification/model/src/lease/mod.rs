//! Leases: the promises of their tokens after losses, and the fence's checks of these tokens.
//!
//! There are three worlds. In [`losses`], the lease store and the database lose data, and the
//! tokens of the store alone are judged. In [`last_word`], the store may grant any token, and the
//! fence decides. In [`line`], clients wait for a lease.

pub mod last_word;
pub mod line;
pub mod losses;
