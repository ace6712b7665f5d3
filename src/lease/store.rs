//! What a store of leases can do.

use std::sync::Arc;

use super::{Acquire, Held, Lease, LeaseError, LeaseId, Renew};
use crate::token::Resource;

/// A store of leases.
pub trait Leases: Send + Sync + 'static {
    /// Grants a lease: at once, or within [`Acquire::wait`] in the order in which it was asked for.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Held`] when another holder has the lease, and the wait ran out.
    /// - [`LeaseError::TooManyWaiters`] when too many wait already.
    /// - [`LeaseError::Exhausted`] when grants are announced, and the resource has seen the highest
    ///   token there is.
    /// - [`LeaseError::Unavailable`] when the store or its epochs cannot be reached. The lease may
    ///   have been granted all the same; asking again with the same lease id tells.
    ///
    /// # Cancel safety
    ///
    /// Dropped while it waits, it leaves the line; a lease that was granted to it meanwhile goes
    /// to the next in line.
    fn acquire(
        &self,
        resource: &Resource,
        request: Acquire,
    ) -> impl Future<Output = Result<Lease, LeaseError>> + Send;

    /// Makes a held lease last [`Renew::ttl`] from now. Its token stays, unless a new one is asked
    /// for.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Lost`] when the lease is not held under this id, or was granted before the store
    ///   lost its history: its token may be outranked, whatever the store has kept of it.
    /// - [`LeaseError::Exhausted`] when a new token is asked for, and there is none above the lease's.
    /// - [`LeaseError::Unavailable`] when the store cannot be reached.
    fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> impl Future<Output = Result<Lease, LeaseError>> + Send;

    /// Ends a held lease.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Lost`] when the lease is not held under this id. A later holder keeps
    ///   it.
    /// - [`LeaseError::Unavailable`] when the store cannot be reached.
    fn release(
        &self,
        resource: &Resource,
        id: &LeaseId,
    ) -> impl Future<Output = Result<(), LeaseError>> + Send;

    /// Tells who holds the lease; `None` when it is free.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Unavailable`] when the store cannot be reached.
    fn inspect(
        &self,
        resource: &Resource,
    ) -> impl Future<Output = Result<Option<Held>, LeaseError>> + Send;
}

impl<L: Leases> Leases for Arc<L> {
    fn acquire(
        &self,
        resource: &Resource,
        request: Acquire,
    ) -> impl Future<Output = Result<Lease, LeaseError>> + Send {
        L::acquire(self, resource, request)
    }

    fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> impl Future<Output = Result<Lease, LeaseError>> + Send {
        L::renew(self, resource, id, request)
    }

    fn release(
        &self,
        resource: &Resource,
        id: &LeaseId,
    ) -> impl Future<Output = Result<(), LeaseError>> + Send {
        L::release(self, resource, id)
    }

    fn inspect(
        &self,
        resource: &Resource,
    ) -> impl Future<Output = Result<Option<Held>, LeaseError>> + Send {
        L::inspect(self, resource)
    }
}
