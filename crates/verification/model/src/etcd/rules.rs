//! The promises, and the rules, each of which can be left out.

use std::fmt;

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Promise {
    Distinct,
    Later,
    Renewed,
    Stands,
    Released,
}

impl Promise {
    pub const ALL: [Self; 5] = [
        Self::Distinct,
        Self::Later,
        Self::Renewed,
        Self::Stands,
        Self::Released,
    ];

    pub const fn text(self) -> &'static str {
        match self {
            Self::Distinct => "no two leases have the same token",
            Self::Later => "a later grant has a higher token",
            Self::Renewed => "a superseded or released lease is not renewed",
            Self::Stands => {
                "a lease ends only if it expires or is released, or if etcd is restored"
            }
            Self::Released => "after a release is answered, the resource is free",
        }
    }
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Rule {
    /// Each attempt has its own etcd lease, with a random id.
    EtcdLeaseOfAttempt,
    /// A request does not write twice under one etcd lease.
    EtcdLeaseOnce,
    /// A request that gives up does not revoke an etcd lease to which it has moved an earlier
    /// lease.
    GiveUpOwn,
    /// A repeated request moves the key to its own etcd lease.
    RepeatMoves,
    /// The answer contains the row and the incarnation that were cached.
    CachedRow,
    /// The lead is compared with the stored lead.
    Checked,
    /// The lead is read after the transaction.
    StatusAfter,
    /// The length of the log and the revision of a lead are from one status.
    LeadOfStatus,
    /// Few etcd leases are created before etcd is checked for a restore.
    FewEtcdLeases,
    /// The call that writes an incarnation and the call that writes the row of its epoch do not
    /// both arrive a second time in another incarnation.
    OneLateWrite,
    /// A new epoch begins after a restore.
    NewEpoch,
    /// An epoch replaces only the row for which it was taken.
    EpochOnRow,
    /// One key stores the incarnation and the lead. The rows store no lead.
    OneIncarnation,
    /// A row that names another incarnation is not valid.
    RowNamesIncarnation,
    /// A renewal reads the key.
    RenewalReads,
    /// A renewal is checked for a restore, like a grant.
    RenewalChecked,
    /// A renewal requires the row from which its token was computed.
    RenewalCounts,
    /// The release of a moved key does not use its earlier etcd lease.
    ReleaseUnmoved,
    /// A release that finds no etcd lease reads the key.
    NotFoundReads,
    /// The etcd lease from which a key was moved is revoked.
    MoveRevokes,
}

impl Rule {
    /// All rules, in the order of the table.
    pub const ALL: &[Self] = &[
        Self::EtcdLeaseOfAttempt,
        Self::EtcdLeaseOnce,
        Self::GiveUpOwn,
        Self::RepeatMoves,
        Self::CachedRow,
        Self::Checked,
        Self::StatusAfter,
        Self::LeadOfStatus,
        Self::FewEtcdLeases,
        Self::OneLateWrite,
        Self::NewEpoch,
        Self::EpochOnRow,
        Self::OneIncarnation,
        Self::RowNamesIncarnation,
        Self::RenewalReads,
        Self::RenewalChecked,
        Self::RenewalCounts,
        Self::ReleaseUnmoved,
        Self::NotFoundReads,
        Self::MoveRevokes,
    ];
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EtcdLeaseOfAttempt => "each attempt has an etcd lease with a random id",
            Self::EtcdLeaseOnce => {
                "a request that may have written the key reads it before it writes again"
            }
            Self::GiveUpOwn => "a request that gives up does not revoke an earlier etcd lease",
            Self::RepeatMoves => "a repeated request moves the lease to its own etcd lease",
            Self::CachedRow => "a grant requires the incarnation and the epoch of the cached row",
            Self::Checked => "each grant is checked for a restore",
            Self::StatusAfter => "the status is read after the transaction, not before it",
            Self::LeadOfStatus => "the log is compared with the revision of the same status",
            Self::FewEtcdLeases => "few etcd leases are created between a restore and the check",
            Self::OneLateWrite => {
                "of the calls that begin an epoch, at most one arrives a second time"
            }
            Self::NewEpoch => "a new epoch begins after a restore",
            Self::OneIncarnation => {
                "one key stores the incarnation and the lead; rows store no lead"
            }
            Self::RowNamesIncarnation => "a row is valid only in the incarnation that it names",
            Self::EpochOnRow => "an epoch replaces only the row for which it was taken",
            Self::RenewalReads => "a renewal reads the key after KeepAlive",
            Self::RenewalChecked => "a renewal is checked for a restore",
            Self::RenewalCounts => "a renewal requires the row from which its token was computed",
            Self::ReleaseUnmoved => {
                "a process removes an etcd lease from memory before it moves the key"
            }
            Self::NotFoundReads => "a release that finds no etcd lease reads the key",
            Self::MoveRevokes => {
                "a request that moves a lease is answered after the old etcd lease is revoked"
            }
        })
    }
}

/// The rules in effect: all, or all but one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    pub(super) without: Option<Rule>,
}

impl Rules {
    pub(super) fn has(self, rule: Rule) -> bool {
        self.without != Some(rule)
    }
}
