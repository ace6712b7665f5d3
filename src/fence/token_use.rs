//! How often a token may write.

use crate::token::Token;

/// How often a token may write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TokenUse {
    /// Once. A repeated request cannot apply twice.
    #[default]
    SingleUse,
    /// As often as its holder likes, until a newer token is seen.
    Reusable,
}

impl TokenUse {
    /// The highest token that is dead when `token` was admitted.
    pub(super) const fn dead(self, token: Token) -> i64 {
        match self {
            Self::SingleUse => token.get(),
            Self::Reusable => token.get() - 1,
        }
    }
}
