//! [`BoxLeases`]: a lease store that is chosen at run time.

use std::sync::Arc;

use derive_where::derive_where;
use futures_util::future::BoxFuture;

use super::{Acquire, Held, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, Page, Renew};
use crate::token::{Resource, Token};

type Answer<'a, T> = BoxFuture<'a, Result<T, LeaseError>>;

/// [`Leases`] and [`LeaseAdmin`] without generics, for trait objects.
trait DynLeases: Send + Sync {
    fn acquire<'a>(&'a self, resource: &'a Resource, request: Acquire) -> Answer<'a, Lease>;

    fn renew<'a>(
        &'a self,
        resource: &'a Resource,
        id: &'a LeaseId,
        request: Renew,
    ) -> Answer<'a, Lease>;

    fn release<'a>(&'a self, resource: &'a Resource, id: &'a LeaseId) -> Answer<'a, ()>;

    fn inspect<'a>(&'a self, resource: &'a Resource) -> Answer<'a, Option<Held>>;

    fn list<'a>(&'a self, limit: usize, cursor: Option<&'a str>) -> Answer<'a, Page>;

    fn break_lease<'a>(&'a self, resource: &'a Resource, seen: Option<Token>) -> Answer<'a, bool>;
}

impl<L: LeaseAdmin> DynLeases for L {
    fn acquire<'a>(&'a self, resource: &'a Resource, request: Acquire) -> Answer<'a, Lease> {
        Box::pin(Leases::acquire(self, resource, request))
    }

    fn renew<'a>(
        &'a self,
        resource: &'a Resource,
        id: &'a LeaseId,
        request: Renew,
    ) -> Answer<'a, Lease> {
        Box::pin(Leases::renew(self, resource, id, request))
    }

    fn release<'a>(&'a self, resource: &'a Resource, id: &'a LeaseId) -> Answer<'a, ()> {
        Box::pin(Leases::release(self, resource, id))
    }

    fn inspect<'a>(&'a self, resource: &'a Resource) -> Answer<'a, Option<Held>> {
        Box::pin(Leases::inspect(self, resource))
    }

    fn list<'a>(&'a self, limit: usize, cursor: Option<&'a str>) -> Answer<'a, Page> {
        Box::pin(LeaseAdmin::list(self, limit, cursor))
    }

    fn break_lease<'a>(&'a self, resource: &'a Resource, seen: Option<Token>) -> Answer<'a, bool> {
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
#[derive_where(Debug)]
#[derive_where(skip_inner)]
pub struct BoxLeases(Arc<dyn DynLeases>);

impl BoxLeases {
    /// Boxes a lease store.
    pub fn new(leases: impl LeaseAdmin) -> Self {
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
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, LeaseError> {
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
