//! Leases: the promises of their tokens after losses, and the fence's checks of these tokens.
//!
//! There are three models. In [`losses`], the lease store and the database lose data, and the
//! promises concern only the tokens of the store. In [`last_word`], the store may grant any token,
//! and the fence decides which tokens it admits. In [`queue`], clients wait for a lease.

pub mod last_word;
pub mod losses;
pub mod queue;

use std::fmt;

/// The kind of a request in [`losses`] and in [`last_word`].
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Kind {
    Acquire,
    Renew { new_token: bool },
    Release,
}

/// The index of a request in [`losses`] and in [`last_word`].
#[derive(Clone, Copy, Hash, PartialEq, Eq)]
pub struct Of(pub usize);

impl fmt::Debug for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["A", "B", "C", "the abandoned request"][self.0])
    }
}
