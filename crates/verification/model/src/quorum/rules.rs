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
            Self::Seal => "sealing: a token is granted when it is chosen",
            Self::SealWhereFree => {
                "a free key when sealing at once: that of another lease is replaced"
            }
            Self::ProposalAbove => "a proposal is above the counter: any proposal is sealed",
            Self::NextAboveCounter => {
                "the next number without a proposal: the counter itself is sealed"
            }
            Self::MissingSealsNothing => {
                "a counter when sealing at once: a missing one has counted nothing"
            }
            Self::BlankSealsNothing => {
                "an epoch when sealing at once: a blank counter has counted nothing"
            }
            Self::SealCounts => "the counter is set when sealing at once",
            Self::SealedOnMajority => "a majority when sealing at once: one node is enough",
            Self::SameTokenSealed => {
                "the same token when sealing at once: different ones are added up"
            }
            Self::TripsApart => "the trips are apart: seals of both are added up",
            Self::LateAnswers => "late answers of the first trip count for nothing",
            Self::ProposalOfCountedEpoch => "the epoch of a proposal is counted in: it is made up",
            Self::SealOnMajority => "a majority when sealing: one node is enough",
            Self::LeaseWhenSealing => "the lease when sealing",
            Self::StampBesideAttempt => "the stamp when sealing: the attempt is enough",
            Self::StampBesideLeaseId => "the attempt, too: the lease id is enough",
            Self::HistoryWhenSealing => "the history when sealing",
            Self::Incarnation => "the incarnation when sealing",
            Self::SealWhereCounted => "sealing only where counters were compared",
            Self::OnlyRaises => "another token is above the one that is stored",
            Self::HigherOfBoth => "the higher of both when sealing: the counter is set",
            Self::NumbersOfOneEpoch => "the epoch when counts are compared",
            Self::HighestOfMajority => "the highest of a majority: one counter is enough",
            Self::HistoryWhenTaking => "the history of a counter",
            Self::BlankUnderNewHistory => "a counter of another history is blank from then on",
            Self::BlankIsUnknown => "a blank counter is unknown: it has counted nothing",
            Self::EpochFromDatabase => "an epoch of the database: the highest one known, plus one",
            Self::EpochAskedNow => "an epoch is asked for when it is needed: it is taken ahead",
            Self::HistoryWhenBeginning => "the history when an epoch begins",
            Self::IncarnationWhenBeginning => "the incarnation when an epoch begins",
            Self::BeginRaises => "an epoch begins above the one that is known",
            Self::StoredOnMajority => "a majority when a token is answered again",
            Self::HistoryOfStoredToken => "the history when a token is answered again",
            Self::NewerAttemptsOnly => "an older attempt is refused",
            Self::RenewalNamesToken => {
                "the token when renewing: equal tokens on a majority are enough"
            }
            Self::RenewalNeedsHistory => "the history when renewing",
            Self::RenewalSetsNothing => "a renewal sets no key that is missing",
            Self::RepairRaises => "a renewal only raises a key",
            Self::RepairRaisesCounter => "a renewal only raises a counter",
            Self::NewTokenNamesToken => {
                "the token when a lease is given another one: the lease id is enough"
            }
            Self::NewTokenNeedsHistory => "the history when a lease is given another token",
            Self::ReleaseOfAttempt => "a release names its grant: the lease id is enough",
            Self::ReleaseOfToken => "the token when releasing: the attempt is enough",
            Self::ReleaseOfMark => "the mark when releasing a higher token of the attempt",
            Self::EndOfWhatWasFound => "a break ends what it has found: the lease id is enough",
            Self::CleanUpOfRequest => "the request when cleaning up: the lease id is enough",
            Self::CleanUpOfMark => {
                "the mark when cleaning up: the token is compared with the proposal"
            }
            Self::CountOfMajority => "a process remembers what a majority has counted",
            Self::NodesStandAlone => "nodes stand alone: a replica of one is promoted",
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
