//! The bounds of the searches.

use super::{Loss, Rule, Rules};
use crate::search::World;

/// The world of a fence that takes precedence over the lease store.
///
/// A bound on events is the maximum number of such events.
#[derive(Clone, Copy, Debug)]
pub struct LastWord {
    pub holders: usize,
    pub issuers: u8,
    /// The possible losses.
    pub losses: &'static [Loss],
    /// The maximum number of losses.
    pub most: u8,
    /// The number of writes under a forged token.
    pub forged: u8,
    /// Whether the forged token may also be the next one, as a reusable token.
    pub next_is_forged: bool,
    /// The number of grants on other resources of the partition, which share the token counter.
    pub neighbours: u8,
    /// The number of requests that continue after their caller has disconnected.
    pub abandoned: u8,
    /// The number of writes that arrive late.
    pub delayed: u8,
    /// Whether holders renew.
    pub renewals: bool,
    /// Whether holders release. A lease that is not released expires.
    pub releases: bool,
    /// The number of renewals with a new token.
    pub new_tokens: u8,
    /// Whether leases are in the database of the fence. If so, leases are lost only together with
    /// the data of the fence.
    pub one_database: bool,
    pub rules: Rules,
}

impl Default for LastWord {
    fn default() -> Self {
        Self {
            holders: 3,
            issuers: 2,
            losses: &[],
            most: 0,
            forged: 0,
            next_is_forged: false,
            neighbours: 0,
            abandoned: 0,
            delayed: 0,
            renewals: false,
            releases: false,
            new_tokens: 0,
            one_database: false,
            rules: Rules::default(),
        }
    }
}

impl LastWord {
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

    fn forged(mut self, forged: u8) -> Self {
        self.forged = forged;
        self
    }

    fn next_is_forged(mut self) -> Self {
        self.next_is_forged = true;
        self
    }

    fn neighbours(mut self, neighbours: u8) -> Self {
        self.neighbours = neighbours;
        self
    }

    fn abandoned(mut self, abandoned: u8) -> Self {
        self.abandoned = abandoned;
        self
    }

    fn delayed(mut self, delayed: u8) -> Self {
        self.delayed = delayed;
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

    fn one_database(mut self) -> Self {
        self.one_database = true;
        self
    }
}

impl World for LastWord {
    type Rule = Rule;
    const NAME: &'static str = "Precedence of the fence";
    const RULES: &'static [Rule] = Rule::ALL;
    const BOUNDS_OF_RULES_ADD: bool = true;

    fn worlds() -> Vec<Self> {
        let two = Self::two();
        let (alone, one) = (two.alone(), two.holders(1));
        vec![
            Self::default().alone(),
            alone.abandoned(1),
            two.releases(),
            alone.renewals().new_tokens(1).delayed(1),
            one.renewals().new_tokens(1).abandoned(1).alone(),
            one.renewals().new_tokens(1).delayed(1),
            alone.forged(1).next_is_forged(),
            alone.forged(1).next_is_forged().neighbours(2).new_tokens(1),
            Self::losing(1, &[Loss::KeysAreCopiedBack])
                .new_tokens(1)
                .alone(),
            alone
                .one_database()
                .renewals()
                .releases()
                .new_tokens(1)
                .delayed(1),
            alone.one_database().abandoned(1),
            alone
                .one_database()
                .renewals()
                .new_tokens(1)
                .forged(1)
                .next_is_forged(),
            Self::losing(1, &[Loss::KeysAreCopiedBack]),
            Self::losing(1, &[Loss::ReplicaIsPromoted]),
            Self::losing(
                1,
                &[
                    Loss::RedisRestarts,
                    Loss::IssuerRestarts(0),
                    Loss::IssuerRestarts(1),
                ],
            ),
            Self::losing(1, &[Loss::StandbyIsPromoted]),
            Self::losing(2, &[Loss::RedisRestarts, Loss::StandbyIsPromoted]),
        ]
    }

    fn large_worlds() -> Vec<Self> {
        let two = Self::two();
        let any = &[
            Loss::RedisRestarts,
            Loss::KeysAreCopiedBack,
            Loss::ReplicaIsPromoted,
            Loss::IssuerRestarts(0),
            Loss::IssuerRestarts(1),
            Loss::DatabaseCrashes,
            Loss::StandbyIsPromoted,
        ];
        vec![
            Self::default(),
            two.forged(1),
            two.forged(1).new_tokens(2).delayed(1),
            Self::losing(1, any),
            Self::losing(1, any).new_tokens(1),
        ]
    }

    fn in_bounds_of(rule: Rule) -> Self {
        let two = Self::two();
        let alone = two.alone();
        match rule {
            Rule::Announce | Rule::Raise | Rule::OfTheStore | Rule::LiftCompares => alone,
            Rule::OnDisk => Self::losing(1, &[Loss::DatabaseCrashes]),
            Rule::Highest | Rule::WhoseLease => Self::losing(1, &[Loss::KeysAreCopiedBack]),
            Rule::Repeats => two.holders(1).renewals(),
            Rule::Lift => alone.forged(1),
            Rule::CounterStays => alone.forged(1).holders(1),
            Rule::NoneBetween => alone.forged(1).neighbours(2).new_tokens(1).holders(1),
            Rule::Ends => alone.forged(1).next_is_forged().new_tokens(1).holders(1),
            Rule::NewToken => alone.holders(1).new_tokens(1).delayed(1),
            Rule::OfOthers => two
                .holders(1)
                .renewals()
                .abandoned(1)
                .new_tokens(1)
                .delayed(1),
            Rule::MoveUp => Self::losing(1, &[Loss::StandbyIsPromoted]),
        }
    }

    fn leave_out(mut self, rule: Rule) -> Self {
        self.rules = Rules::without(rule);
        self
    }
}
