//! The steps of the world, and their text in counterexamples.

use std::fmt;

use super::bounds::Request;

/// One step: a call of a request with its effect and its answer, or a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    LeaseGrant(Of),
    Txn(Of),
    /// The answer is lost, and the transaction is sent again.
    TxnWithoutAnswer(Of),
    Status(Of),
    /// The status is read before the transaction.
    StatusAhead(Of),
    WriteIncarnation(Of),
    TakeEpoch(Of),
    BeginEpoch(Of),
    RevokeOld(Of),
    ReadKey(Of),
    KeepAlive(Of),
    Revoke(Of),
    GiveUp(Of),
    LeaseGrantAgain(Of),
    TxnAgain(Of),
    WriteIncarnationAgain(Of),
    BeginEpochAgain(Of),
    RevokeAgain(Of),
    Expire(u8),
    Snapshot,
    Restore,
    /// Many leases of the second partition are granted and released.
    LeadGrows,
}

/// A request, with its index. In a counterexample, its text is its number, its kind, its lease and
/// its issuer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Of(pub usize, pub Request);

impl fmt::Debug for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(place, request) = self;
        let lease = char::from(b'a' + request.lease);
        let (number, issuer) = (place + 1, request.issuer + 1);
        write!(
            f,
            "{number}: {:?} of {lease} at issuer {issuer}",
            request.kind
        )
    }
}
