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
    /// What `max_token` becomes when `token` is admitted.
    pub(super) const fn floor(self, token: Token) -> i64 {
        match self {
            Self::SingleUse => token.get(),
            Self::Reusable => token.get() - 1,
        }
    }
}
