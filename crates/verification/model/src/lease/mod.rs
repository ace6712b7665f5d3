//! Leases: the promises of their tokens after losses, and the fence's checks of these tokens.
//!
//! There are three models. In [`losses`], the lease store and the database lose data, and the
//! promises concern only the tokens of the store. In [`last_word`], the store may grant any token,
//! and the fence decides which tokens it admits. In [`queue`], clients wait for a lease.

pub mod last_word;
pub mod losses;
pub mod queue;
