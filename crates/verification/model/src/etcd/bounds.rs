//! The bounds of the searches.

use super::{Rule, Rules, state::Spent};
use crate::search::World;

/// An etcd cluster, two issuers, and the database that assigns epochs.
#[derive(Clone, Debug)]
pub struct Etcd {
    pub(super) requests: Vec<Request>,
    pub(super) begins: Begins,
    /// Whether a snapshot was taken at the beginning.
    pub(super) is_saved: bool,
    /// Whether the first request is granted at the beginning, before the snapshot.
    pub(super) first_is_granted: bool,
    /// Whether a request may give up before it is answered.
    pub(super) gives_up: bool,
    /// Whether any etcd lease of a key may expire at any moment.
    pub(super) expires: bool,
    /// Events that occur a limited number of times.
    pub(super) most: Spent,
    pub(super) rules: Rules,
}

/// The initial keys of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begins {
    /// No key of the store.
    Empty,
    /// Each partition has an epoch. The issuers have cached its row.
    Begun,
    /// Like `Begun`, in a cluster that was restored once.
    AfterRestore,
}

/// A request of a client to an issuer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub lease: u8,
    /// The resource. Each resource has a partition of its own.
    pub resource: usize,
    pub issuer: usize,
    pub kind: Kind,
    /// The request that must be answered before this request begins.
    pub(super) after: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Acquire,
    /// A renewal with the same TTL: KeepAlive, and a transaction that reads.
    Renew,
    /// A renewal with another TTL: the key moves to another etcd lease.
    Move,
    Release,
}

impl Request {
    const fn new(lease: u8, issuer: usize, kind: Kind) -> Self {
        Self {
            lease,
            resource: 0,
            issuer,
            kind,
            after: None,
        }
    }

    const fn on_second_resource(self) -> Self {
        Self {
            resource: 1,
            ..self
        }
    }

    const fn after(self, request: usize) -> Self {
        Self {
            after: Some(request),
            ..self
        }
    }
}

const A: Request = Request::new(0, 0, Kind::Acquire);
const A_AT_SECOND: Request = Request::new(0, 1, Kind::Acquire);
const B: Request = Request::new(1, 1, Kind::Acquire);
const C: Request = Request::new(2, 0, Kind::Acquire);
const RENEW_A: Request = Request::new(0, 0, Kind::Renew);
const MOVE_A: Request = Request::new(0, 0, Kind::Move);
const MOVE_A_AT_SECOND: Request = Request::new(0, 1, Kind::Move);
const RELEASE_A: Request = Request::new(0, 0, Kind::Release);
const RELEASE_A_AT_SECOND: Request = Request::new(0, 1, Kind::Release);

impl Etcd {
    fn of(requests: &[Request]) -> Self {
        Self {
            requests: requests.to_vec(),
            begins: Begins::Begun,
            is_saved: false,
            first_is_granted: false,
            gives_up: false,
            expires: true,
            most: Spent::default(),
            rules: Rules::default(),
        }
    }

    /// Whether the issuer later uses the etcd lease of this grant from memory.
    pub(super) fn is_of_use(&self, granted: &Request) -> bool {
        let is_use = |request: &Request| {
            let place = (request.lease, request.issuer) == (granted.lease, granted.issuer);
            place && matches!(request.kind, Kind::Renew | Kind::Release)
        };
        self.requests.iter().any(is_use)
    }

    fn restores(mut self, snapshots: u8, restores: u8) -> Self {
        (self.most.snapshots, self.most.restores) = (snapshots, restores);
        self
    }

    /// Allows restores of etcd from its initial state.
    fn restores_the_beginning(mut self, restores: u8) -> Self {
        (self.is_saved, self.most.restores) = (true, restores);
        self
    }

    fn copies(mut self, most: u8) -> Self {
        self.most.copies = most;
        self
    }

    fn grows(mut self) -> Self {
        self.most.grown = 1;
        self
    }

    fn first_is_granted(mut self) -> Self {
        self.first_is_granted = true;
        self
    }

    fn gives_up(mut self) -> Self {
        self.gives_up = true;
        self
    }

    fn never_expires(mut self) -> Self {
        self.expires = false;
        self
    }

    fn empty(mut self) -> Self {
        self.begins = Begins::Empty;
        self
    }

    fn after_restore(mut self) -> Self {
        self.begins = Begins::AfterRestore;
        self
    }
}

impl World for Etcd {
    type Rule = Rule;
    const NAME: &'static str = "Leases in etcd";
    const RULES: &'static [Rule] = Rule::ALL;
    const BOUNDS_OF_RULES_ADD: bool = true;

    fn worlds() -> Vec<Self> {
        vec![
            Self::of(&[A, B]).empty().restores(1, 1).copies(1),
            Self::of(&[A, B]).restores(1, 1).copies(1),
            Self::of(&[A, B]).restores(2, 2),
            Self::of(&[A, A_AT_SECOND, B, RENEW_A]).copies(1).gives_up(),
            Self::of(&[A, RELEASE_A, A_AT_SECOND.after(1)])
                .restores(1, 1)
                .copies(1),
            Self::of(&[A, MOVE_A_AT_SECOND, RELEASE_A, B]).gives_up(),
            Self::of(&[A, B, RENEW_A]).restores(1, 1),
            Self::of(&[A, B, C.on_second_resource()])
                .restores_the_beginning(1)
                .never_expires()
                .grows(),
        ]
    }

    fn large_worlds() -> Vec<Self> {
        vec![
            Self::of(&[A, B]).restores(1, 2).copies(1),
            Self::of(&[A, B, C]).restores(1, 1),
            Self::of(&[A, B, C.on_second_resource()])
                .restores_the_beginning(1)
                .grows(),
            Self::of(&[A, A_AT_SECOND, B, RENEW_A])
                .first_is_granted()
                .restores_the_beginning(1)
                .copies(1)
                .gives_up(),
            Self::of(&[A, MOVE_A, RELEASE_A_AT_SECOND, B])
                .restores(1, 1)
                .copies(1),
        ]
    }

    fn in_bounds_of(rule: Rule) -> Self {
        match rule {
            Rule::EtcdLeaseOfAttempt => Self::of(&[A, RELEASE_A, A_AT_SECOND.after(1)]).copies(1),
            Rule::EtcdLeaseOnce => Self::of(&[A, A_AT_SECOND]).copies(1),
            Rule::GiveUpOwn | Rule::RepeatMoves => Self::of(&[A, A_AT_SECOND]).gives_up(),
            Rule::EpochOnRow => Self::of(&[A, B, C]).empty(),
            Rule::CachedRow => Self::of(&[A, B, C]).empty().restores_the_beginning(1),
            Rule::Checked | Rule::StatusAfter | Rule::NewEpoch => Self::of(&[A, B]).restores(1, 1),
            Rule::LeadOfStatus => Self::of(&[A, B]).after_restore().restores_the_beginning(1),
            Rule::OneLateWrite => Self::of(&[A, B]).restores_the_beginning(2).copies(2),
            Rule::FewEtcdLeases => Self::of(&[A, B]).restores(1, 1).grows(),
            Rule::OneIncarnation | Rule::RowNamesIncarnation => {
                Self::of(&[A, B, C.on_second_resource()])
                    .restores(1, 1)
                    .never_expires()
                    .grows()
            }
            Rule::RenewalReads => Self::of(&[A, B, RENEW_A]).copies(1),
            Rule::RenewalChecked => Self::of(&[A, B, RENEW_A]).restores(1, 1),
            Rule::RenewalCounts => Self::of(&[A, B, RENEW_A, C])
                .first_is_granted()
                .restores_the_beginning(1),
            Rule::ReleaseUnmoved => Self::of(&[A, MOVE_A, RELEASE_A]).gives_up(),
            Rule::NotFoundReads | Rule::MoveRevokes => Self::of(&[A, MOVE_A_AT_SECOND, RELEASE_A]),
        }
    }

    fn leave_out(mut self, rule: Rule) -> Self {
        self.rules = Rules::without(rule);
        self
    }
}
