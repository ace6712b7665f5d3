//! The rules of a quorum, each of which can be left out.

use std::fmt;

/// What may not be left out. The numbered steps are those of `src/lease/quorum/mod.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// To take is not to be granted.
    Seal,
    /// Nor is it to be sealed on a few nodes.
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
    /// Also where the key is older than the clock.
    IncarnationOfClock,
    /// Only the nodes are sealed whose clocks were counted.
    SealWhereCounted,
    /// No seal turns a clock back.
    HigherOfBoth,
    /// Nor does a higher number of an older epoch.
    NumbersOfOneEpoch,
    /// A token is counted from the highest clock of a majority.
    HighestOfMajority,
    /// A clock counts under the history in which it was written.
    HistoryWhenTaking,
    /// Another one is blank from the first time on that it is met.
    BlankUnderNewHistory,
    /// A clock that was lost is not one that has counted nothing.
    LostIsNotZero,
    /// Nor is it passed over where another one is usable.
    LostIsNotPassedOver,
    /// The epoch comes from the database.
    EpochFromDatabase,
    /// And was not asked for ahead.
    EpochAskedNow,
    /// A token that is answered again is one that a majority has.
    StoredOnMajority,
    /// A key keeps its token under the history in which it was sealed.
    HistoryOfStoredToken,
    /// One attempt chooses one token.
    OneChoice,
    /// It is above the one that the lease has.
    AboveStoredToken,
    /// A newer attempt of a lease is not followed by an older one.
    NewerAttemptsOnly,
    /// A renewal needs a token on each node.
    RenewalNeedsToken,
    /// And the same one.
    RenewalNeedsSameToken,
    /// And the history in which it was sealed.
    RenewalNeedsHistory,
    /// It sets no key that is missing.
    RenewalSetsNothing,
    /// A renewal for another token needs the history, too.
    NewTokenNeedsHistory,
    /// A release ends what was found.
    ReleaseOfWhatWasFound,
    /// Cleaning up ends keys of that attempt.
    CleanUpOfAttempt,
    /// And none that has the token of an earlier one.
    CleanUpOfToken,
    /// Nor one that has the same token from an earlier one.
    CleanUpWhereSealed,
    /// What only a minority has counted is not remembered.
    CountOfMajority,
    /// A node has no replicas, and is none.
    NodesStandAlone,
}

/// All rules, in the order of the table.
pub(super) const ALL: &[Rule] = &[
    Rule::Seal,
    Rule::SealOnMajority,
    Rule::LeaseWhenSealing,
    Rule::StampBesideAttempt,
    Rule::StampBesideLeaseId,
    Rule::HistoryWhenSealing,
    Rule::Incarnation,
    Rule::IncarnationOfClock,
    Rule::SealWhereCounted,
    Rule::HigherOfBoth,
    Rule::NumbersOfOneEpoch,
    Rule::HighestOfMajority,
    Rule::HistoryWhenTaking,
    Rule::BlankUnderNewHistory,
    Rule::LostIsNotZero,
    Rule::LostIsNotPassedOver,
    Rule::EpochFromDatabase,
    Rule::EpochAskedNow,
    Rule::StoredOnMajority,
    Rule::HistoryOfStoredToken,
    Rule::OneChoice,
    Rule::AboveStoredToken,
    Rule::NewerAttemptsOnly,
    Rule::RenewalNeedsToken,
    Rule::RenewalNeedsSameToken,
    Rule::RenewalNeedsHistory,
    Rule::RenewalSetsNothing,
    Rule::NewTokenNeedsHistory,
    Rule::ReleaseOfWhatWasFound,
    Rule::CleanUpOfAttempt,
    Rule::CleanUpOfToken,
    Rule::CleanUpWhereSealed,
    Rule::CountOfMajority,
    Rule::NodesStandAlone,
];

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Seal => "sealing: a token is granted when it is chosen",
            Self::SealOnMajority => "a majority when sealing: one node is enough",
            Self::LeaseWhenSealing => "the lease when sealing",
            Self::StampBesideAttempt => "the stamp when sealing: the attempt is enough",
            Self::StampBesideLeaseId => "the attempt, too: the lease id is enough",
            Self::HistoryWhenSealing => "the history when sealing",
            Self::Incarnation => "the incarnation",
            Self::IncarnationOfClock => "the incarnation of the clock: that of the key is enough",
            Self::SealWhereCounted => "sealing only where clocks were counted",
            Self::HigherOfBoth => "the higher of both when sealing: the clock is set",
            Self::NumbersOfOneEpoch => "the epoch when counts are compared",
            Self::HighestOfMajority => "the highest of a majority: one clock is enough",
            Self::HistoryWhenTaking => "the history of a clock",
            Self::BlankUnderNewHistory => "a clock of another history is blank from then on",
            Self::LostIsNotZero => "a lost clock is unknown: it has counted nothing",
            Self::LostIsNotPassedOver => "a lost clock is unknown: it is passed over for another",
            Self::EpochFromDatabase => "an epoch of the database: the highest one known, plus one",
            Self::EpochAskedNow => "an epoch is asked for when it is needed: it is taken ahead",
            Self::StoredOnMajority => "a majority when a token is answered again",
            Self::HistoryOfStoredToken => "the history when a token is answered again",
            Self::OneChoice => "an attempt chooses one token",
            Self::AboveStoredToken => "another token is above the one that is stored",
            Self::NewerAttemptsOnly => "an older attempt is refused",
            Self::RenewalNeedsToken => "a token on each node when renewing",
            Self::RenewalNeedsSameToken => "the same token on each node when renewing",
            Self::RenewalNeedsHistory => "the history when renewing",
            Self::RenewalSetsNothing => "a renewal sets no key that is missing",
            Self::NewTokenNeedsHistory => "the history when a lease is given another token",
            Self::ReleaseOfWhatWasFound => {
                "a release ends what it has found: the lease id is enough"
            }
            Self::CleanUpOfAttempt => "the attempt when cleaning up",
            Self::CleanUpOfToken => "the token when cleaning up",
            Self::CleanUpWhereSealed => {
                "the node when cleaning up: it is enough to have chosen the token"
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
