//! The rules of a quorum, each of which can be left out.

use crate::search::{self, rules};

rules! {
    Seal: "a token is granted when it is sealed, not when it is chosen",
    SealWhereFree: "a take does not replace the key of another lease",
    ProposalAbove: "a take seals a proposal only above the counter",
    NextAboveCounter: "a take without a proposal seals the next number of the counter",
    MissingSealsNothing: "a take seals nothing if the counter is missing",
    BlankSealsNothing: "a take seals nothing if the counter is blank",
    SealCounts: "a take that seals sets the counter",
    SealedOnMajority: "a grant in the first trip requires a majority of sealed nodes",
    SameTokenSealed: "a grant in the first trip requires the same token on a majority of nodes",
    TripsApart: "seals of the first trip are not counted in the second trip",
    LateAnswers: "answers of the first trip are ignored after the choice of the token",
    ProposalOfCountedEpoch: "a proposal is in an epoch that a counter of the nodes has reached",
    SealOnMajority: "a grant in the second trip requires a majority of sealed nodes",
    LeaseWhenSealing: "a seal requires that the key still belongs to the lease",
    StampBesideLeaseId: "a seal compares the attempt, not only the lease id",
    ReplicationIdWhenSealing: "a seal compares the replication id",
    OnlyRaises: "a new token for a lease is above its stored token",
    HigherOfBoth: "a seal never lowers the counter",
    HighestOfMajority:
        "a token is above the highest counter of a majority, not only above one counter",
    ReplicationIdWhenTaking: "a counter is valid only under its replication id",
    BlankUnderNewReplicationId: "under another replication id, a counter becomes blank",
    BlankIsUnknown: "a blank counter means that the count is unknown, not that it is 0",
    EpochFromDatabase: "a new epoch comes from the database, not from the highest known epoch",
    StoredOnMajority: "a stored token is returned again only if a majority of the nodes has it",
    NewerAttemptsOnly: "an attempt that is older than the attempt of the key is refused",
    RenewalNamesToken: "a renewal compares the token of the holder with that of the key",
    RenewalNeedsReplicationId: "a renewal compares the replication id",
    RenewalSetsNothing: "a renewal does not create a missing key",
    RepairRaises: "a renewal never lowers the token of a key",
    NewTokenNamesToken: "a request for a new token compares the token, not only the lease id",
    NewTokenNeedsReplicationId: "a request for a new token compares the replication id",
    ReleaseOfAttempt: "a release compares the grant, not only the lease id",
    ReleaseOfToken: "a release compares the token, not only the attempt",
    ReleaseOfMark: "a release removes a higher token of its attempt only if the key has the mark",
    EndOfWhatWasFound: "a break compares the key that was read, not only the lease id",
    CleanUpOfRequest: "a clean-up compares the request of the key, not only the lease id",
    CleanUpOfMark: "a clean-up checks the mark, not whether the token is the proposal",
    CountOfMajority: "a process keeps in memory only a count that a majority has reached",
    NodesStandAlone: "no replica of a node is promoted",
}

pub type Rules = search::Rules<Rule>;
