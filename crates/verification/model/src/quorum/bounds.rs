//! The bounds of the searches.

use super::{Rule, Rules, client::Request, server::Token, state::Spent};
use crate::search::World;

/// Nodes, clients, and the database that assigns epochs.
#[derive(Clone, Debug)]
pub struct Quorum {
    pub(super) nodes: usize,
    /// Whether the counters of the nodes are at the first token of the first epoch, which belongs
    /// to a lease that has ended. Otherwise the nodes have no counters.
    pub(super) has_counted: bool,
    pub(super) requests: Vec<Request>,
    /// Whether the first request is granted on all nodes at the beginning.
    pub(super) first_is_granted: bool,
    /// The leases that are renewed with the same token, one renewal after the other.
    pub(super) renewals: Vec<u8>,
    /// The leases that their holders release.
    pub(super) releases: Vec<u8>,
    /// The leases that are read, and then broken.
    pub(super) breaks: Vec<u8>,
    /// Whether all nodes have saved their initial data.
    pub(super) saved: bool,
    /// The number of nodes that the takes of a request reach.
    pub(super) reach: usize,
    /// The first request for which keys expire. Any key may expire at any moment, but the search
    /// lets a key expire only when such a request takes the node.
    pub(super) expires_from: usize,
    /// Whether a client may give up before it is granted a token, and clean up.
    pub(super) gives_up: bool,
    /// Whether all clients are one process, which keeps the highest count of the nodes in memory.
    pub(super) caches_count: bool,
    /// The maximum number of events of each limited kind.
    pub(super) most: Spent,
    pub(super) rules: Rules,
}

const A: Request = Request::new(0, 1);
const A2: Request = Request::new(0, 2);
const A3: Request = Request::new(0, 3);
const B: Request = Request::new(1, 1);
const B2: Request = Request::new(1, 2);
const C: Request = Request::new(2, 1);

impl Quorum {
    fn of(requests: &[Request]) -> Self {
        Self {
            nodes: 3,
            has_counted: true,
            requests: requests.to_vec(),
            first_is_granted: false,
            renewals: vec![],
            releases: vec![],
            breaks: vec![],
            saved: false,
            reach: 3,
            expires_from: 0,
            gives_up: false,
            caches_count: false,
            most: Spent::default(),
            rules: Rules::default(),
        }
    }

    /// Allows takes that run a second time, or after the choice of the token.
    fn late_takes(mut self, most: u8) -> Self {
        self.most.late_takes = most;
        self
    }

    /// Allows restarts of nodes. If no data is ever saved, nodes restart empty. Otherwise they
    /// restart with their saved data.
    fn restarts(mut self, most: u8, saves: u8) -> Self {
        (self.most.restarts, self.most.saves) = (most, saves);
        self
    }

    fn evicts(mut self, most: u8) -> Self {
        self.most.evictions = most;
        self
    }

    fn flushes(mut self, most: u8) -> Self {
        self.most.flushes = most;
        self
    }

    fn renews(mut self, leases: &[u8]) -> Self {
        self.renewals = leases.to_vec();
        self
    }

    fn releases(mut self, leases: &[u8]) -> Self {
        self.releases = leases.to_vec();
        self
    }

    fn breaks(mut self, leases: &[u8]) -> Self {
        self.breaks = leases.to_vec();
        self
    }

    fn gives_up(mut self) -> Self {
        self.gives_up = true;
        self
    }

    fn caches_count(mut self) -> Self {
        self.caches_count = true;
        self
    }

    fn without_counters(mut self) -> Self {
        self.has_counted = false;
        self
    }

    fn first_is_granted(mut self) -> Self {
        self.first_is_granted = true;
        self
    }

    /// Allows restarts of nodes with their initial data.
    fn restarts_from_the_beginning(mut self, most: u8) -> Self {
        (self.most.restarts, self.saved) = (most, true);
        self
    }

    fn reaching(mut self, nodes: usize) -> Self {
        self.reach = nodes;
        self
    }

    fn never_expires(mut self) -> Self {
        self.expires_from = usize::MAX;
        self
    }

    /// Returns the worlds for random walks. One world has two leases, and every kind of call for
    /// one lease. The other world has two resources.
    pub fn walks() -> Vec<Self> {
        let leases = [A, A2.proposing(4), A3.another_token(None), B.proposing(3)];
        let resources = [A.on_second_resource(), B.proposing(3), B2, C.proposing(3)];
        vec![
            Self::of(&leases)
                .gives_up()
                .late_takes(4)
                .evicts(1)
                .renews(&[0, 1])
                .releases(&[0, 1])
                .breaks(&[0, 0])
                .without_counters(),
            Self::of(&resources)
                .late_takes(4)
                .renews(&[1, 2])
                .releases(&[1, 2])
                .breaks(&[2]),
        ]
    }

    /// Adds restarts and flushes of nodes.
    #[must_use]
    pub fn with_restarts(self) -> Self {
        self.restarts(3, 3).flushes(1)
    }

    fn nodes(mut self, nodes: usize) -> Self {
        (self.nodes, self.reach) = (nodes, nodes);
        self
    }
}

impl World for Quorum {
    type Rule = Rule;
    const NAME: &'static str = "A quorum of Redis nodes";
    const RULES: &'static [Rule] = Rule::ALL;

    /// Bounds with two leases, and with a late take, a restart, clean-ups or a release. In some
    /// bounds, one lease is requested twice.
    fn worlds() -> Vec<Self> {
        vec![
            Self::of(&[A.proposing(3), B]).late_takes(1).renews(&[0]),
            Self::of(&[A.proposing(3), B]).reaching(2).restarts(1, 0),
            Self::of(&[A, A2.proposing(3), B])
                .reaching(2)
                .gives_up()
                .renews(&[0]),
            Self::of(&[A, A2.proposing(3), B]).releases(&[0]),
            Self::of(&[A, A2.instead_of_first(), B])
                .reaching(2)
                .renews(&[0]),
        ]
    }

    /// Bounds with a third lease, a restart on all nodes, or five nodes.
    fn large_worlds() -> Vec<Self> {
        vec![
            Self::of(&[A, B.proposing(3), C]).late_takes(1),
            Self::of(&[A.proposing(3), B]).restarts(1, 0),
            Self::of(&[A, B.proposing(3)]).nodes(5),
        ]
    }

    fn in_bounds_of(rule: Rule) -> Self {
        match rule {
            Rule::Seal
            | Rule::SealWhereFree
            | Rule::NextAboveCounter
            | Rule::SealCounts
            | Rule::SealedOnMajority
            | Rule::SealOnMajority
            | Rule::LeaseWhenSealing => Self::of(&[A, B]),
            Rule::NodesStandAlone => Self::of(&[A, B]).reaching(2),
            Rule::ProposalAbove => Self::of(&[A.proposing(2), B.proposing(2)]),
            Rule::SameTokenSealed | Rule::TripsApart | Rule::HighestOfMajority => {
                Self::of(&[A, B, C])
            }
            Rule::MissingSealsNothing => Self::of(&[A, B]).evicts(1),
            Rule::BlankSealsNothing => Self::of(&[A, B]).restarts_from_the_beginning(1),
            Rule::ProposalOfCountedEpoch => Self::of(&[A.proposing_of(2, 1), B]).restarts(1, 0),
            Rule::LateAnswers => Self::of(&[A, B, C]).late_takes(1),
            Rule::StampBesideLeaseId | Rule::StoredOnMajority => Self::of(&[A, A2, B]),
            Rule::ReplicationIdWhenSealing => Self::of(&[A, B]).restarts(1, 1),
            Rule::ReplicationIdWhenTaking => Self::of(&[A, B]).restarts_from_the_beginning(1),
            Rule::HigherOfBoth => Self::of(&[A.on_second_resource(), B, C]).reaching(2),
            Rule::BlankUnderNewReplicationId => Self::of(&[A, B, C])
                .reaching(2)
                .restarts_from_the_beginning(1),
            Rule::BlankIsUnknown => Self::of(&[A, B]).restarts(1, 0),
            Rule::EpochFromDatabase => Self::of(&[A, B]).reaching(2).restarts(2, 0),
            Rule::OnlyRaises => {
                let above = Some(Token::new(7, 5));
                Self::of(&[A, A2.another_token(above), A3.another_token(None)])
                    .first_is_granted()
                    .never_expires()
            }
            Rule::NewerAttemptsOnly => Self::of(&[A, A2]).renews(&[0]),
            Rule::RenewalNamesToken => Self::of(&[A, B]).late_takes(2).renews(&[0]),
            Rule::RenewalNeedsReplicationId => Self::of(&[A, B])
                .first_is_granted()
                .restarts_from_the_beginning(1)
                .renews(&[0]),
            Rule::RenewalSetsNothing => Self::of(&[A, B]).first_is_granted().renews(&[0]),
            Rule::RepairRaises => Self::of(&[A, B]).renews(&[0]),
            Rule::NewTokenNamesToken => Self::of(&[A, A2.another_token(None), B])
                .first_is_granted()
                .reaching(2)
                .late_takes(2),
            Rule::NewTokenNeedsReplicationId => Self::of(&[A, A2.another_token(None), B])
                .first_is_granted()
                .reaching(2)
                .restarts_from_the_beginning(1),
            Rule::ReleaseOfAttempt | Rule::ReleaseOfToken | Rule::ReleaseOfMark => {
                Self::of(&[A, A2]).releases(&[0])
            }
            Rule::EndOfWhatWasFound => Self::of(&[A, A2])
                .first_is_granted()
                .breaks(&[0, 0])
                .never_expires(),
            Rule::CleanUpOfRequest => Self::of(&[A, A2]).gives_up(),
            Rule::CleanUpOfMark => Self::of(&[A, A2.proposing(2)]).gives_up(),
            Rule::CountOfMajority => Self::of(&[A, B.on_second_resource()])
                .first_is_granted()
                .renews(&[0, 0])
                .caches_count(),
        }
    }

    fn leave_out(mut self, rule: Rule) -> Self {
        self.rules = Rules::without(rule);
        self
    }
}
