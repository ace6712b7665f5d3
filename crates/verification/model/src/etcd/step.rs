//! The steps of the world, and their text in counterexamples.

use std::fmt;

use super::bounds::{Kind, Request};

/// One step: a call of a request with its effect and its answer, or a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
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

/// A request, with its index.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Of(pub usize, pub Request);

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lease = char::from(b'a' + self.1.lease);
        let kind = match self.1.kind {
            Kind::Acquire => "acquire",
            Kind::Renew => "renewal",
            Kind::Move => "renewal with another TTL",
            Kind::Release => "release",
        };
        write!(
            f,
            "{lease}, {kind} {} at issuer {}",
            self.0 + 1,
            self.1.issuer + 1
        )
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LeaseGrant(of) => write!(f, "{of}: LeaseGrant"),
            Self::Txn(of) => write!(f, "{of}: Txn"),
            Self::TxnWithoutAnswer(of) => write!(f, "{of}: Txn, whose answer is lost"),
            Self::Status(of) => write!(f, "{of}: status"),
            Self::StatusAhead(of) => write!(f, "{of}: status, before the Txn"),
            Self::WriteIncarnation(of) => write!(f, "{of}: writes a new incarnation"),
            Self::TakeEpoch(of) => write!(f, "{of}: takes an epoch"),
            Self::BeginEpoch(of) => write!(f, "{of}: begins the epoch"),
            Self::RevokeOld(of) => write!(f, "{of}: revokes the old etcd lease"),
            Self::ReadKey(of) => write!(f, "{of}: reads the key"),
            Self::KeepAlive(of) => write!(f, "{of}: KeepAlive"),
            Self::Revoke(of) => write!(f, "{of}: LeaseRevoke"),
            Self::GiveUp(of) => write!(f, "{of}: gives up"),
            Self::LeaseGrantAgain(of) => write!(f, "{of}: LeaseGrant arrives a second time"),
            Self::TxnAgain(of) => write!(f, "{of}: Txn arrives a second time"),
            Self::WriteIncarnationAgain(of) => {
                write!(f, "{of}: the new incarnation arrives a second time")
            }
            Self::BeginEpochAgain(of) => write!(f, "{of}: the epoch arrives a second time"),
            Self::RevokeAgain(of) => write!(f, "{of}: LeaseRevoke arrives a second time"),
            Self::Expire(etcd_lease) => write!(f, "etcd lease {} expires", etcd_lease + 1),
            Self::Snapshot => f.write_str("a snapshot of etcd is taken"),
            Self::Restore => f.write_str("etcd is restored from the snapshot"),
            Self::LeadGrows => {
                f.write_str("many leases of the second partition are granted and released")
            }
        }
    }
}
