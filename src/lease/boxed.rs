//! [`BoxLeases`]: a lease store that is chosen at run time.

use std::{fmt, pin::Pin, sync::Arc};

use super::{
    Acquire, Held, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, ListError, Page, Renew,
};
use crate::token::{Resource, Token};

/// Future returned by the methods of [`DynLeases`].
pub type LeaseFuture<'a, T, E = LeaseError> =
    Pin<Box<dyn Future<Output = Result<T, E>> + Send + 'a>>;

/// [`Leases`] and [`LeaseAdmin`] without generics, for trait objects.
///
/// Every [`LeaseAdmin`] implements this trait.
pub trait DynLeases: Send + Sync + 'static {
    /// Acquires a lease; see [`Leases::acquire`].
    fn acquire<'a>(&'a self, resource: &'a Resource, request: Acquire) -> LeaseFuture<'a, Lease>;

    /// Renews a lease; see [`Leases::renew`].
    fn renew<'a>(
        &'a self,
        resource: &'a Resource,
        id: &'a LeaseId,
        request: Renew,
    ) -> LeaseFuture<'a, Lease>;

    /// Releases a lease; see [`Leases::release`].
    fn release<'a>(&'a self, resource: &'a Resource, id: &'a LeaseId) -> LeaseFuture<'a, ()>;

    /// Returns the held lease; see [`Leases::inspect`].
    fn inspect<'a>(&'a self, resource: &'a Resource) -> LeaseFuture<'a, Option<Held>>;

    /// Lists held leases; see [`LeaseAdmin::list`].
    fn list<'a>(
        &'a self,
        limit: usize,
        cursor: Option<&'a str>,
    ) -> LeaseFuture<'a, Page, ListError>;

    /// Breaks a lease; see [`LeaseAdmin::break_lease`].
    fn break_lease<'a>(
        &'a self,
        resource: &'a Resource,
        seen: Option<Token>,
    ) -> LeaseFuture<'a, bool>;
}

impl<L: LeaseAdmin> DynLeases for L {
    fn acquire<'a>(&'a self, resource: &'a Resource, request: Acquire) -> LeaseFuture<'a, Lease> {
        Box::pin(Leases::acquire(self, resource, request))
    }

    fn renew<'a>(
        &'a self,
        resource: &'a Resource,
        id: &'a LeaseId,
        request: Renew,
    ) -> LeaseFuture<'a, Lease> {
        Box::pin(Leases::renew(self, resource, id, request))
    }

    fn release<'a>(&'a self, resource: &'a Resource, id: &'a LeaseId) -> LeaseFuture<'a, ()> {
        Box::pin(Leases::release(self, resource, id))
    }

    fn inspect<'a>(&'a self, resource: &'a Resource) -> LeaseFuture<'a, Option<Held>> {
        Box::pin(Leases::inspect(self, resource))
    }

    fn list<'a>(
        &'a self,
        limit: usize,
        cursor: Option<&'a str>,
    ) -> LeaseFuture<'a, Page, ListError> {
        Box::pin(LeaseAdmin::list(self, limit, cursor))
    }

    fn break_lease<'a>(
        &'a self,
        resource: &'a Resource,
        seen: Option<Token>,
    ) -> LeaseFuture<'a, bool> {
        Box::pin(LeaseAdmin::break_lease(self, resource, seen))
    }
}

/// Lease store of any type, for a program that chooses the store at run time.
///
/// The value is cheap to clone.
///
/// # Example
///
/// ```
/// # use tower_fence::{epochs::Epochs, lease::{BoxLeases, MemoryLeases, RedisLeases}};
/// fn store(redis: Option<&str>, epochs: impl Epochs + 'static) -> BoxLeases {
///     match redis {
///         Some(url) => BoxLeases::new(RedisLeases::connect_lazy(url, epochs).unwrap()),
///         None => BoxLeases::new(MemoryLeases::new(epochs)),
///     }
/// }
/// ```
#[derive(Clone)]
pub struct BoxLeases(Arc<dyn DynLeases>);

impl BoxLeases {
    /// Boxes a lease store.
    pub fn new(leases: impl DynLeases) -> Self {
        Self(Arc::new(leases))
    }
}

impl Leases for BoxLeases {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        self.0.acquire(resource, request).await
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        self.0.renew(resource, id, request).await
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        self.0.release(resource, id).await
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.0.inspect(resource).await
    }
}

impl LeaseAdmin for BoxLeases {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        self.0.list(limit, cursor).await
    }

    async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        self.0.break_lease(resource, seen).await
    }
}

impl fmt::Debug for BoxLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoxLeases").finish_non_exhaustive()
    }
}
