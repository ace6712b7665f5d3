//! The rules of a quorum, each of which can be left out.

use std::fmt;

/// What the protocol compares. Nothing was found to break without some of these, in the bounds that were searched:
/// they are not in [`ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// To choose a token is not to be granted it.
    Seal,
    /// A token is sealed at once only if there is no key.
    SealWhereFree,
    /// A proposal is above the counter.
    ProposalAbove,
    /// Without one, the token is above the counter, too.
    NextAboveCounter,
    /// A counter that is missing seals nothing at once.
    MissingSealsNothing,
    /// Nor does a blank one.
    BlankSealsNothing,
    /// To seal at once sets the counter, in the same script.
    SealCounts,
    /// A token that is sealed at once is granted on a majority.
    SealedOnMajority,
    /// It is the same token on all of them.
    SameTokenSealed,
    /// Seals of the first trip do not count in the second one.
    TripsApart,
    /// Nor do answers that come after the choice.
    LateAnswers,
    /// The epoch of a proposal is one in which a node has counted.
    ProposalOfCountedEpoch,
    /// The second trip seals a majority.
    SealOnMajority,
    /// A seal fits to the lease that was taken.
    LeaseWhenSealing,
    /// And to its stamp, not to the attempt alone.
    StampBesideAttempt,
    /// Still less to the lease id alone.
    StampBesideLeaseId,
    /// A seal fits to the history in which the key was taken.
    HistoryWhenSealing,
    /// And to the incarnation.
    Incarnation,
    /// Only the nodes are sealed whose counters were compared.
    SealWhereCounted,
    /// A token of a lease is above those before it.
    OnlyRaises,
    /// No seal turns a counter back.
    HigherOfBoth,
    /// Nor does a higher number of an older epoch.
    NumbersOfOneEpoch,
    /// A token is counted from the highest counter of a majority.
    HighestOfMajority,
    /// A counter counts in the history in which it was written.
    HistoryWhenTaking,
    /// Another one is blank from the first time on that it is met.
    BlankUnderNewHistory,
    /// A blank counter is not one that has counted nothing.
    BlankIsUnknown,
    /// The epoch comes from the database.
    EpochFromDatabase,
    /// And was not asked for ahead.
    EpochAskedNow,
    /// An epoch begins in the history in which it was needed.
    HistoryWhenBeginning,
    /// And on that very counter.
    IncarnationWhenBeginning,
    /// It begins above the one that the counter knows.
    BeginRaises,
    /// A token that is answered again is one that a majority has.
    StoredOnMajority,
    /// A key keeps its token in the history in which it was sealed.
    HistoryOfStoredToken,
    /// A newer attempt of a lease is not followed by an older one.
    NewerAttemptsOnly,
    /// A renewal names the token that the holder has.
    RenewalNamesToken,
    /// And needs the history in which it was sealed.
    RenewalNeedsHistory,
    /// It sets no key that is missing.
    RenewalSetsNothing,
    /// It lowers no token on a node that has a higher one.
    RepairRaises,
    /// Nor a counter.
    RepairRaisesCounter,
    /// A new token is sealed over exactly the one that the holder has.
    NewTokenNamesToken,
    /// And needs the history.
    NewTokenNeedsHistory,
    /// A release ends more than the lease id says.
    ReleaseOfAttempt,
    /// It ends no token above the one that is released.
    ReleaseOfToken,
    /// But for one that the very attempt has sealed.
    ReleaseOfMark,
    /// A break ends what was found.
    EndOfWhatWasFound,
    /// Cleaning up ends keys of that request.
    CleanUpOfRequest,
    /// And none that has a token of another one.
    CleanUpOfMark,
    /// What only a minority has counted is not remembered.
    CountOfMajority,
    /// A node has no replicas, and is none.
    NodesStandAlone,
}

/// The rules that are needed, in the order of the table.
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
    Rule::HistoryWhenSealing,
    Rule::OnlyRaises,
    Rule::HigherOfBoth,
    Rule::HighestOfMajority,
    Rule::HistoryWhenTaking,
    Rule::BlankUnderNewHistory,
    Rule::BlankIsUnknown,
    Rule::EpochFromDatabase,
    Rule::StoredOnMajority,
    Rule::NewerAttemptsOnly,
    Rule::RenewalNamesToken,
    Rule::RenewalNeedsHistory,
    Rule::RenewalSetsNothing,
    Rule::RepairRaises,
    Rule::NewTokenNamesToken,
    Rule::NewTokenNeedsHistory,
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
                "without a proposal, a take seals the next number, not that of the counter"
            }
            Self::MissingSealsNothing => "a take seals nothing if the counter is missing",
            Self::BlankSealsNothing => "a take seals nothing if the counter is blank",
            Self::SealCounts => "a take that seals sets the counter",
            Self::SealedOnMajority => "a grant by the first trip needs a majority of sealed nodes",
            Self::SameTokenSealed => {
                "a grant by the first trip needs the same token on each of these nodes"
            }
            Self::TripsApart => "seals of the first trip do not count in the second trip",
            Self::LateAnswers => "answers of the first trip do not count after the choice",
            Self::ProposalOfCountedEpoch => {
                "the epoch of a proposal is one in which the nodes have counted"
            }
            Self::SealOnMajority => "a grant by the second trip needs a majority of sealed nodes",
            Self::LeaseWhenSealing => "a seal requires that the lease still has the key",
            Self::StampBesideAttempt => "a seal compares the stamp, not only the attempt",
            Self::StampBesideLeaseId => "a seal compares the attempt, not only the lease id",
            Self::HistoryWhenSealing => "a seal compares the replication id",
            Self::Incarnation => "a seal compares the incarnation of the counter",
            Self::SealWhereCounted => "a seal is sent only to nodes whose counters were compared",
            Self::OnlyRaises => "another token of a lease is above the stored one",
            Self::HigherOfBoth => "a seal never lowers the counter",
            Self::NumbersOfOneEpoch => "counts are compared by epoch, and then by number",
            Self::HighestOfMajority => {
                "a token is above the highest counter of a majority, not above one counter"
            }
            Self::HistoryWhenTaking => "a counter is valid only under its replication id",
            Self::BlankUnderNewHistory => "under another replication id, a counter becomes blank",
            Self::BlankIsUnknown => {
                "a blank counter is unknown, and does not mean that nothing was counted"
            }
            Self::EpochFromDatabase => {
                "a new epoch comes from the database, not from the highest known epoch"
            }
            Self::EpochAskedNow => "an epoch is taken when it is needed, not in advance",
            Self::HistoryWhenBeginning => {
                "an epoch begins only under the replication id that needed it"
            }
            Self::IncarnationWhenBeginning => {
                "an epoch begins only on the incarnation that needed it"
            }
            Self::BeginRaises => "an epoch begins only above the epoch of the counter",
            Self::StoredOnMajority => "a stored token is answered again only if a majority has it",
            Self::HistoryOfStoredToken => {
                "a stored token is answered again only under its replication id"
            }
            Self::NewerAttemptsOnly => "an attempt that is older than that of the key is refused",
            Self::RenewalNamesToken => {
                "a renewal compares the token of the holder with that of the key"
            }
            Self::RenewalNeedsHistory => "a renewal compares the replication id",
            Self::RenewalSetsNothing => "a renewal sets no missing key",
            Self::RepairRaises => "a renewal never lowers the token of a key",
            Self::RepairRaisesCounter => "a renewal never lowers a counter",
            Self::NewTokenNamesToken => {
                "a request for another token compares the token, not only the lease id"
            }
            Self::NewTokenNeedsHistory => "a request for another token compares the replication id",
            Self::ReleaseOfAttempt => "a release compares the grant, not only the lease id",
            Self::ReleaseOfToken => "a release compares the token, not only the attempt",
            Self::ReleaseOfMark => {
                "a release ends a higher token of its attempt only if the key has the mark"
            }
            Self::EndOfWhatWasFound => {
                "a break ends only the key that it has read, not any of the lease id"
            }
            Self::CleanUpOfRequest => {
                "a clean-up ends only the key of its request, not any of the lease id"
            }
            Self::CleanUpOfMark => {
                "a clean-up checks the mark, not whether the token is the proposal"
            }
            Self::CountOfMajority => "a process remembers only what a majority has counted",
            Self::NodesStandAlone => "no replica of a node is promoted",
        })
    }
}

/// All rules, or all but one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    pub(super) without: Option<Rule>,
}

impl Rules {
    pub(super) fn has(self, rule: Rule) -> bool {
        self.without != Some(rule)
    }
}
