//! Leases: the promises of their tokens after losses, and the fence's checks of these tokens.
//!
//! There are three models. In [`losses`], the lease store and the database lose data, and the
//! promises concern only the tokens of the store. In [`last_word`], the store may grant any token,
//! and the fence decides which tokens it admits. In [`queue`], clients wait for a lease.

pub mod last_word;
pub mod losses;
pub mod queue;

use std::fmt;

/// The maximum number of holders in [`losses`] and in [`last_word`].
pub const HOLDERS: usize = 3;

/// A holder in [`losses`] and in [`last_word`], with its view of its lease.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Holder<L> {
    #[default]
    New,
    Asks,
    Holds(L),
    Done,
}

/// The kind of a request in [`losses`] and in [`last_word`].
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Kind {
    Acquire,
    Renew { new_token: bool },
    Release,
}

impl Kind {
    /// Returns the requests of a holder that has a lease.
    fn of_holder(releases: bool, renewals: bool, new_tokens: bool) -> impl Iterator<Item = Self> {
        let renew = |new_token| Self::Renew { new_token };
        let all = [
            (Self::Release, releases),
            (renew(false), renewals),
            (renew(true), new_tokens),
        ];
        let possible = all.into_iter().filter(|(_, is_possible)| *is_possible);
        possible.map(|(kind, _)| kind)
    }
}

/// The index of a request in [`losses`] and in [`last_word`].
#[derive(Clone, Copy, Hash, PartialEq, Eq)]
pub struct Of(pub usize);

impl fmt::Debug for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["A", "B", "C", "the abandoned request"][self.0])
    }
}
