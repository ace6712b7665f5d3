//! What the statements are asked, and what they answer.

use std::time::Duration;

use crate::{
    fence::{claims::Claim, token_use::TokenUse},
    stale::StaleToken,
    token::{Resource, Token},
};

/// What an admission is asked for.
#[derive(Clone, Copy)]
pub(crate) struct Admit<'a> {
    pub(in crate::fence) resource: &'a Resource,
    pub(in crate::fence) token: Token,
    /// What `max_token` becomes.
    pub(in crate::fence) dead: i64,
    /// The lock that the transaction takes with it.
    pub(in crate::fence) lock: AdvisoryLock,
}

impl<'a> Admit<'a> {
    pub(in crate::fence) const fn new(
        claim: &'a Claim,
        token_use: TokenUse,
        lock: AdvisoryLock,
    ) -> Self {
        Self {
            resource: &claim.resource,
            token: claim.token,
            dead: token_use.dead(claim.token),
            lock,
        }
    }
}

/// What became of a token that was checked.
pub(crate) enum Admission {
    /// It was admitted, and `max_token` moved.
    Admitted,
    /// It is not newer than `max_token`.
    Stale(Dead),
    /// The row, or the partition, is in a history from which the database may have lost something, or was until a moment
    /// ago: [`Backend::catch_up`] comes first. Nothing was changed.
    Behind,
}

/// What is dead of a resource.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dead {
    /// The highest token that is.
    pub(in crate::fence) max_token: i64,
    /// Whether that is the floor of its partition, since it has no row.
    pub(in crate::fence) by_floor: bool,
}

impl Dead {
    pub(in crate::fence) const fn by_row(max_token: i64) -> Self {
        Self {
            max_token,
            by_floor: false,
        }
    }

    pub(in crate::fence) const fn by_floor(floor: i64) -> Self {
        Self {
            max_token: floor,
            by_floor: true,
        }
    }

    /// The refusal of a token that is dead.
    pub(in crate::fence) fn refuse(self, resource: &Resource, token: Token) -> StaleToken {
        StaleToken::new(resource.clone(), token, self.max_token, self.by_floor)
    }
}

/// Which rows of a partition may be removed, and how many of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    pub(in crate::fence) older_than: Duration,
    pub(in crate::fence) at_most: u32,
    /// The highest token that was surely granted; without that, the last of the last epoch that was
    /// handed out.
    pub(in crate::fence) granted: Option<Token>,
    /// The lowest token of a lease that is held, if any is known.
    pub(in crate::fence) live: Option<Token>,
}

/// The number of an advisory lock by which others find a transaction on the server. An admission
/// takes it, in shared mode, before it waits for the row, and it lasts as long as the transaction.
/// The number is random, so nobody else has it, and it costs no round trip to know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdvisoryLock(pub(super) i64);

impl AdvisoryLock {
    pub(in crate::fence) fn random() -> Self {
        Self(rand::random())
    }
}

/// What became of a grant that was announced.
pub(crate) enum Announcement {
    /// Everyone older is dead.
    Announced,
    /// A token as high as `highest` was seen or announced already; perhaps this very grant was the
    /// last one to be announced. Nothing was changed.
    Outranked { highest: i64, was_last: bool },
    /// As [`Admission::Behind`]; or somebody else has made the row meanwhile.
    Behind,
}

/// A row of the fence as it was before a read.
pub(crate) struct RowVersion {
    pub(in crate::fence) max_token: i64,
    /// What no later version of the row has, or nothing that can be told apart.
    pub(in crate::fence) version: Option<String>,
    /// It is of a history from which the database may have lost something, so what is dead may be more.
    pub(in crate::fence) is_behind: bool,
    /// Sessions do not wait for the disk, so a crash may take back what was seen here.
    pub(in crate::fence) may_be_lost: bool,
}
