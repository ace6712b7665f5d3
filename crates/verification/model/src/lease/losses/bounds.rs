//! The bounds of the searches.

use super::{Loss, Rule, Rules};
use crate::search::World;

/// The world of a lease store and of databases, all of which may lose data.
///
/// A bound on events is the maximum number of such events.
#[derive(Clone, Copy, Debug)]
pub struct Losses {
    pub holders: usize,
    pub issuers: usize,
    /// The number of applications. If there are two, each has its own issuer and database.
    pub applications: usize,
    /// Whether the last holder uses another resource of the partition.
    pub apart: bool,
    /// The possible losses.
    pub losses: &'static [Loss],
    /// The maximum number of losses.
    pub most: u8,
    /// The number of requests that continue after their caller has disconnected.
    pub abandoned: u8,
    /// Whether holders renew.
    pub renewals: bool,
    /// Whether holders release. A lease that is not released expires.
    pub releases: bool,
    /// The number of renewals with a new token.
    pub new_tokens: u8,
    /// The exclusive upper bound of the numbers of a counter. It is 10⁹ in the crate.
    pub numbers: u8,
    /// Whether the database detects that its timeline has changed.
    pub notices: bool,
    pub rules: Rules,
}

impl Default for Losses {
    fn default() -> Self {
        Self {
            holders: 3,
            issuers: 2,
            applications: 1,
            apart: false,
            losses: &[],
            most: 0,
            abandoned: 0,
            renewals: false,
            releases: false,
            new_tokens: 0,
            numbers: 8,
            notices: false,
            rules: Rules::default(),
        }
    }
}

impl Losses {
    /// Returns bounds with two holders.
    fn two() -> Self {
        Self {
            holders: 2,
            ..Self::default()
        }
    }

    /// Returns bounds with two holders and these losses.
    fn losing(most: u8, losses: &'static [Loss]) -> Self {
        Self {
            most,
            losses,
            ..Self::two()
        }
    }

    fn holders(mut self, holders: usize) -> Self {
        self.holders = holders;
        self
    }

    /// Allows only one issuer.
    fn alone(mut self) -> Self {
        self.issuers = 1;
        self
    }

    fn applications(mut self, applications: usize) -> Self {
        self.applications = applications;
        self
    }

    fn apart(mut self) -> Self {
        self.apart = true;
        self
    }

    fn abandoned(mut self, abandoned: u8) -> Self {
        self.abandoned = abandoned;
        self
    }

    fn renewals(mut self) -> Self {
        self.renewals = true;
        self
    }

    fn releases(mut self) -> Self {
        self.releases = true;
        self
    }

    fn new_tokens(mut self, new_tokens: u8) -> Self {
        self.new_tokens = new_tokens;
        self
    }

    fn numbers(mut self, numbers: u8) -> Self {
        self.numbers = numbers;
        self
    }

    fn notices(mut self) -> Self {
        self.notices = true;
        self
    }
}

impl World for Losses {
    type Rule = Rule;
    const NAME: &'static str = "Leases and losses";
    const RULES: &'static [Rule] = Rule::ALL;
    const BOUNDS_OF_RULES_ADD: bool = true;

    fn worlds() -> Vec<Self> {
        let promoted_and_flushed =
            Self::losing(2, &[Loss::StandbyIsPromoted, Loss::RedisIsFlushed]);
        vec![
            Self::two().renewals().releases().new_tokens(1),
            Self::two().abandoned(1).numbers(2),
            Self::losing(1, &[Loss::RedisIsFlushed]),
            Self::losing(1, ANY_OF_REDIS),
            Self::losing(2, &[Loss::DatabaseCrashes, Loss::RedisIsFlushed]),
            promoted_and_flushed,
            promoted_and_flushed.notices(),
            Self::losing(1, &[Loss::KeysAreCopiedBack])
                .alone()
                .renewals(),
            Self::losing(2, &[Loss::StandbyIsPromoted, Loss::KeysAreCopiedBack]).alone(),
            Self::losing(1, &[Loss::ReplicaIsPromoted]),
            Self::losing(2, &[Loss::ReplicaIsPromoted, Loss::RedisIsFlushed]),
            Self::losing(2, &[Loss::RedisIsFlushed]).applications(2),
        ]
    }

    fn large_worlds() -> Vec<Self> {
        vec![
            Self::losing(1, ANY_OF_REDIS).holders(3),
            Self::losing(2, &[Loss::RedisIsFlushed, Loss::RedisRestartsFromAnOldFile]).holders(3),
            Self::losing(2, ANY_OF_REDIS),
            Self::losing(1, ANY_OF_REDIS).abandoned(1),
            Self::losing(1, &[Loss::ReplicaIsPromoted]).holders(3),
            Self::losing(2, PROMOTION_AND_ANOTHER),
            Self::losing(
                2,
                &[Loss::StandbyIsPromoted, Loss::RedisRestartsFromAnOldFile],
            )
            .notices(),
        ]
    }

    fn in_bounds_of(rule: Rule) -> Self {
        let flushed = |most| Self::losing(most, &[Loss::RedisIsFlushed]);
        match rule {
            Rule::Epoch => flushed(1),
            Rule::ReplicationId => Self::losing(1, &[Loss::RedisRestartsFromAnOldFile]),
            Rule::Incarnation => flushed(1).abandoned(1),
            Rule::AboveTheCounter => Self::two().abandoned(1).numbers(2),
            Rule::NotAhead => flushed(1).holders(3),
            Rule::EndOfNumbers => flushed(1).alone().new_tokens(2).numbers(2),
            Rule::Durable => Self::losing(2, &[Loss::DatabaseCrashes, Loss::RedisIsFlushed]),
            Rule::ReReported | Rule::Again => {
                Self::losing(2, &[Loss::StandbyIsPromoted, Loss::RedisIsFlushed])
            }
            Rule::MoveUp => {
                Self::losing(2, &[Loss::StandbyIsPromoted, Loss::RedisIsFlushed]).notices()
            }
            Rule::Memory | Rule::BeginsAbove => Self::losing(1, &[Loss::KeysAreCopiedBack]).alone(),
            Rule::FindMaster => Self::losing(1, &[Loss::ReplicaIsPromoted])
                .alone()
                .holders(3),
            Rule::LeaseOfACounter => {
                Self::losing(1, &[Loss::RedisRestartsFromAnOldFile]).renewals()
            }
            Rule::LeaseOfTheEpoch => Self::losing(1, &[Loss::RedisRestartsFromAnOldFile])
                .alone()
                .holders(3)
                .apart()
                .renewals(),
            Rule::Source => Self::two().applications(2),
            Rule::RenewCompares => Self::two().renewals(),
            Rule::ReleaseCompares => Self::two().renewals().releases(),
        }
    }

    fn leave_out(mut self, rule: Rule) -> Self {
        self.rules = Rules::without(rule);
        self
    }
}

/// The restarts of issuers, and all losses of Redis except promotions and keys that are restored
/// under the same replication id.
const ANY_OF_REDIS: &[Loss] = &[
    Loss::RedisRestartsEmpty,
    Loss::RedisRestartsFromAnOldFile,
    Loss::RedisRestarts,
    Loss::RedisIsFlushed,
    Loss::CounterIsEvicted,
    Loss::IssuerRestarts(0),
    Loss::IssuerRestarts(1),
];

/// A promotion, and other losses before or after it.
const PROMOTION_AND_ANOTHER: &[Loss] = &[
    Loss::ReplicaIsPromoted,
    Loss::RedisIsFlushed,
    Loss::CounterIsEvicted,
    Loss::IssuerRestarts(0),
    Loss::IssuerRestarts(1),
];
