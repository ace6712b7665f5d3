//! Interface of a lease store.

use std::sync::Arc;

use super::{Acquire, Held, Lease, LeaseError, LeaseId, Renew};
use crate::token::Resource;

/// Lease store, which grants, renews and releases leases.
pub trait Leases: Send + Sync + 'static {
    /// Acquires a lease, and waits for it up to [`Acquire::wait`]. If the store has a queue,
    /// waiters are served in the order of arrival.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Held`] if another holder still has the lease after the wait.
    /// - [`LeaseError::TooManyWaiters`] if too many requests are already waiting.
    /// - [`LeaseError::Exhausted`] if grants are announced, and the resource has received the
    ///   highest possible token.
    /// - [`LeaseError::Invalid`] if the store does not accept a value of the request.
    /// - [`LeaseError::Unavailable`] if the store or its source of epochs is unreachable. In this
    ///   case, the lease may have been granted, and a retry with the same lease id returns it.
    /// - [`LeaseError::Misconfigured`] if the store or its source of epochs is not set up
    ///   correctly.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped while it waits, the request leaves the queue, and a lease that was
    /// granted to the dropped request is released. If the caller has chosen the lease id
    /// ([`Acquire::lease_id`]), the position or the lease is kept for a few seconds, so that the
    /// caller can retry.
    fn acquire(
        &self,
        resource: &Resource,
        request: Acquire,
    ) -> impl Future<Output = Result<Lease, LeaseError>> + Send;

    /// Extends a held lease to [`Renew::ttl`] from now. The lease keeps its token, unless the
    /// request asks for a new one.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Lost`] if the lease is not held under this id, or was granted before the
    ///   store lost data. In the latter case its token may be stale, even if the store still has
    ///   the lease.
    /// - [`LeaseError::Exhausted`] if a new token is requested, and no token is left above the
    ///   lease's token.
    /// - [`LeaseError::Invalid`] if the store does not accept a value of the request, for example
    ///   because it does not support [`Renew::at_least`].
    /// - [`LeaseError::Unavailable`] if the store or its source of epochs is unreachable.
    /// - [`LeaseError::Misconfigured`] if the store or its source of epochs is not set up
    ///   correctly.
    fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> impl Future<Output = Result<Lease, LeaseError>> + Send;

    /// Releases a held lease.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Lost`] if the lease is not held under this id. A lease of a later holder is
    ///   not affected.
    /// - [`LeaseError::Unavailable`] if the store is unreachable.
    /// - [`LeaseError::Misconfigured`] if the store is not set up correctly.
    fn release(
        &self,
        resource: &Resource,
        id: &LeaseId,
    ) -> impl Future<Output = Result<(), LeaseError>> + Send;

    /// Returns the held lease, or `None` if the resource is free.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Unavailable`] if the store is unreachable.
    /// - [`LeaseError::Misconfigured`] if the store is not set up correctly.
    fn inspect(
        &self,
        resource: &Resource,
    ) -> impl Future<Output = Result<Option<Held>, LeaseError>> + Send;
}

impl<L: Leases> Leases for Arc<L> {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        L::acquire(self, resource, request).await
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        L::renew(self, resource, id, request).await
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        L::release(self, resource, id).await
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        L::inspect(self, resource).await
    }
}
