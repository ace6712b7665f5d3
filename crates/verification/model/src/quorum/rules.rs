//! The rules of a quorum, each of which can be left out.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A token is granted when it is sealed, not when it is chosen.
    Seal,
    /// A take seals a token only if the node has no key.
    SealWhereFree,
    /// A take seals a proposal only above the counter.
    ProposalAbove,
    /// Without a proposal, a take seals a token above the counter.
    NextAboveCounter,
    /// A take seals nothing if the counter is missing.
    MissingSealsNothing,
    /// A take seals nothing if the counter is blank.
    BlankSealsNothing,
    /// A take that seals sets the counter, in the same script.
    SealCounts,
    /// A grant in the first trip requires a majority of sealed nodes.
    SealedOnMajority,
    /// A grant in the first trip requires the same token on a majority of nodes.
    SameTokenSealed,
    /// Seals of the first trip are not counted in the second trip.
    TripsApart,
    /// Answers of the first trip are ignored after the choice of the token.
    LateAnswers,
    /// A proposal is in an epoch that a counter of the nodes has reached.
    ProposalOfCountedEpoch,
    /// A grant in the second trip requires a majority of sealed nodes.
    SealOnMajority,
    /// A seal requires that the key still belongs to the lease.
    LeaseWhenSealing,
    /// A seal compares the attempt in addition to the lease id.
    StampBesideLeaseId,
    /// A seal requires the replication id under which the key was taken.
    ReplicationIdWhenSealing,
    /// Another token for a lease is above its earlier tokens.
    OnlyRaises,
    /// A seal never lowers a counter.
    HigherOfBoth,
    /// A token is above the highest counter of a majority.
    HighestOfMajority,
    /// A counter is valid only under the replication id under which it was written.
    ReplicationIdWhenTaking,
    /// Under another replication id, a counter becomes blank with the next take.
    BlankUnderNewReplicationId,
    /// A blank counter means that the count is unknown, not that it is 0.
    BlankIsUnknown,
    /// An epoch comes from the database.
    EpochFromDatabase,
    /// A stored token is returned again only if a majority has it.
    StoredOnMajority,
    /// An older attempt of a lease is refused.
    NewerAttemptsOnly,
    /// A renewal names the token of the holder.
    RenewalNamesToken,
    /// A renewal requires the replication id under which the token was sealed.
    RenewalNeedsReplicationId,
    /// A renewal does not create a missing key.
    RenewalSetsNothing,
    /// A renewal never lowers the token of a key.
    RepairRaises,
    /// Another token is sealed only over the token of the holder.
    NewTokenNamesToken,
    /// A request for another token requires the replication id under which the token was sealed.
    NewTokenNeedsReplicationId,
    /// A release names its grant, not only the lease id.
    ReleaseOfAttempt,
    /// A release does not remove a token above the released one.
    ReleaseOfToken,
    /// A release also removes a higher token that its own attempt has sealed.
    ReleaseOfMark,
    /// A break removes only the key that it has read.
    EndOfWhatWasFound,
    /// A clean-up removes only the key of its request.
    CleanUpOfRequest,
    /// A clean-up does not remove a token that another request has sealed.
    CleanUpOfMark,
    /// A process keeps in memory only a count that a majority has reached.
    CountOfMajority,
    /// No replica of a node is promoted.
    NodesStandAlone,
}

/// All rules, in the order of the table.
pub(super) const ALL: &[Rule] = &[
    Rule::Seal,
    Rule::SealWhereFree,
    Rule::ProposalAbove,
    Rule::NextAboveCounter,
    Rule::MissingSealsNothing,
    Rule::BlankSealsNothing,
    Rule::SealCounts,
    Rule::SealedOnMajority,
    Rule::SameTokenSealed,
    Rule::TripsApart,
    Rule::LateAnswers,
    Rule::ProposalOfCountedEpoch,
    Rule::SealOnMajority,
    Rule::LeaseWhenSealing,
    Rule::StampBesideLeaseId,
    Rule::ReplicationIdWhenSealing,
    Rule::OnlyRaises,
    Rule::HigherOfBoth,
    Rule::HighestOfMajority,
    Rule::ReplicationIdWhenTaking,
    Rule::BlankUnderNewReplicationId,
    Rule::BlankIsUnknown,
    Rule::EpochFromDatabase,
    Rule::StoredOnMajority,
    Rule::NewerAttemptsOnly,
    Rule::RenewalNamesToken,
    Rule::RenewalNeedsReplicationId,
    Rule::RenewalSetsNothing,
    Rule::RepairRaises,
    Rule::NewTokenNamesToken,
    Rule::NewTokenNeedsReplicationId,
    Rule::ReleaseOfAttempt,
    Rule::ReleaseOfToken,
    Rule::ReleaseOfMark,
    Rule::EndOfWhatWasFound,
    Rule::CleanUpOfRequest,
    Rule::CleanUpOfMark,
    Rule::CountOfMajority,
    Rule::NodesStandAlone,
];

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Seal => "a token is granted when it is sealed, not when it is chosen",
            Self::SealWhereFree => "a take does not replace the key of another lease",
            Self::ProposalAbove => "a take seals a proposal only above the counter",
            Self::NextAboveCounter => {
                "a take without a proposal seals the next number of the counter"
            }
            Self::MissingSealsNothing => "a take seals nothing if the counter is missing",
            Self::BlankSealsNothing => "a take seals nothing if the counter is blank",
            Self::SealCounts => "a take that seals sets the counter",
            Self::SealedOnMajority => {
                "a grant in the first trip requires a majority of sealed nodes"
            }
            Self::SameTokenSealed => {
                "a grant in the first trip requires the same token on a majority of nodes"
            }
            Self::TripsApart => "seals of the first trip are not counted in the second trip",
            Self::LateAnswers => {
                "answers of the first trip are ignored after the choice of the token"
            }
            Self::ProposalOfCountedEpoch => {
                "a proposal is in an epoch that a counter of the nodes has reached"
            }
            Self::SealOnMajority => {
                "a grant in the second trip requires a majority of sealed nodes"
            }
            Self::LeaseWhenSealing => "a seal requires that the key still belongs to the lease",
            Self::StampBesideLeaseId => "a seal compares the attempt, not only the lease id",
            Self::ReplicationIdWhenSealing => "a seal compares the replication id",
            Self::OnlyRaises => "a new token for a lease is above its stored token",
            Self::HigherOfBoth => "a seal never lowers the counter",
            Self::HighestOfMajority => {
                "a token is above the highest counter of a majority, not only above one counter"
            }
            Self::ReplicationIdWhenTaking => "a counter is valid only under its replication id",
            Self::BlankUnderNewReplicationId => {
                "under another replication id, a counter becomes blank"
            }
            Self::BlankIsUnknown => {
                "a blank counter means that the count is unknown, not that it is 0"
            }
            Self::EpochFromDatabase => {
                "a new epoch comes from the database, not from the highest known epoch"
            }
            Self::StoredOnMajority => {
                "a stored token is returned again only if a majority of the nodes has it"
            }
            Self::NewerAttemptsOnly => {
                "an attempt that is older than the attempt of the key is refused"
            }
            Self::RenewalNamesToken => {
                "a renewal compares the token of the holder with that of the key"
            }
            Self::RenewalNeedsReplicationId => "a renewal compares the replication id",
            Self::RenewalSetsNothing => "a renewal does not create a missing key",
            Self::RepairRaises => "a renewal never lowers the token of a key",
            Self::NewTokenNamesToken => {
                "a request for a new token compares the token, not only the lease id"
            }
            Self::NewTokenNeedsReplicationId => {
                "a request for a new token compares the replication id"
            }
            Self::ReleaseOfAttempt => "a release compares the grant, not only the lease id",
            Self::ReleaseOfToken => "a release compares the token, not only the attempt",
            Self::ReleaseOfMark => {
                "a release removes a higher token of its attempt only if the key has the mark"
            }
            Self::EndOfWhatWasFound => {
                "a break compares the key that was read, not only the lease id"
            }
            Self::CleanUpOfRequest => {
                "a clean-up compares the request of the key, not only the lease id"
            }
            Self::CleanUpOfMark => {
                "a clean-up checks the mark, not whether the token is the proposal"
            }
            Self::CountOfMajority => {
                "a process keeps in memory only a count that a majority has reached"
            }
            Self::NodesStandAlone => "no replica of a node is promoted",
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
