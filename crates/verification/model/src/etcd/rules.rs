//! The promises, and the rules, each of which can be left out.

use super::Etcd;
use crate::search::{self, promises, rules};

promises! {
    Etcd, |state| state.broken,
    Distinct: "no two leases have the same token",
    Later: "a later grant has a higher token",
    Renewed: "a superseded or released lease is not renewed",
    Stands: "a lease ends only if it expires or is released, or if etcd is restored",
    Released: "after a release is answered, the resource is free",
}

rules! {
    EtcdLeaseOfAttempt: "each attempt has an etcd lease with a random id",
    EtcdLeaseOnce: "a request that may have written the key reads it before it writes again",
    GiveUpOwn: "a request that gives up does not revoke an earlier etcd lease",
    RepeatMoves: "a repeated request moves the lease to its own etcd lease",
    CachedRow: "a grant requires the incarnation and the epoch of the cached row",
    Checked: "each grant is checked for a restore",
    StatusAfter: "the status is read after the transaction, not before it",
    LeadOfStatus: "the log is compared with the revision of the same status",
    FewEtcdLeases: "few etcd leases are created between a restore and the check",
    OneLateWrite: "of the calls that begin an epoch, at most one arrives a second time",
    NewEpoch: "a new epoch begins after a restore",
    EpochOnRow: "an epoch replaces only the row for which it was taken",
    OneIncarnation: "one key stores the incarnation and the lead; rows store no lead",
    RowNamesIncarnation: "a row is valid only in the incarnation that it names",
    RenewalReads: "a renewal reads the key after KeepAlive",
    RenewalChecked: "a renewal is checked for a restore",
    RenewalCounts: "a renewal requires the row from which its token was computed",
    ReleaseUnmoved: "a process removes an etcd lease from memory before it moves the key",
    NotFoundReads: "a release that finds no etcd lease reads the key",
    MoveRevokes: "a request that moves a lease is answered after the old etcd lease is revoked",
}

pub type Rules = search::Rules<Rule>;
