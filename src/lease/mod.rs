//! The lock side, without HTTP: [`Leases`] grants leases with strictly increasing tokens.
//!
//! 1. A lease is a time-bounded grant on a resource to one holder. It ends by release or by time.
//! 2. Each grant carries a token that is higher than that of every grant of the resource before
//!    it, whatever the store has lost meanwhile.
//! 3. A grant is idempotent by its lease id: asking again with the same id, while the lease is
//!    held, returns the same token and starts its time anew. So an answer that was lost costs
//!    nothing. A token that cannot count any more (the store has lost its history since, or the token
//!    is announced and was used up) is replaced by a higher one.
//! 4. Only the lease id renews and releases.
//!
//! A lease alone protects nothing: its holder may be paused past its end. The resource does, by
//! refusing tokens that are not newer than what it has seen.
//!
//! # Example
//!
//! ```
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! use std::time::Duration;
//! use tower_fence::{Fence, Resource, lease::{Acquire, EmbeddedLeases, LeaseError, Leases}};
//!
//! # let pool = sqlx::sqlite::SqlitePoolOptions::new()
//! #     .max_connections(1)
//! #     .connect("sqlite::memory:")
//! #     .await?;
//! let fence = Fence::new(pool);
//! fence.migrate().await?;
//! let leases = EmbeddedLeases::new(fence);
//!
//! let sku = Resource::new("sku-1")?;
//! let first = leases.acquire(&sku, Acquire::new(Duration::from_secs(30))).await?;
//! let second = leases.acquire(&sku, Acquire::new(Duration::from_secs(30))).await;
//! assert!(matches!(second, Err(LeaseError::Held { .. })));
//!
//! leases.release(&sku, &first.id).await?;
//! let second = leases.acquire(&sku, Acquire::new(Duration::from_secs(30))).await?;
//! assert!(second.token > first.token);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod announced;
#[cfg(feature = "embedded")]
mod embedded;
mod error;
mod grant;
mod id;
#[cfg(any(feature = "redis", feature = "embedded"))]
mod memory;
mod operate;
#[cfg(feature = "redis")]
mod redis;
mod release_guard;
mod request;
#[cfg(any(feature = "redis", feature = "embedded"))]
mod single_flight;
mod time;

use std::sync::Arc;

#[cfg(feature = "embedded")]
pub use self::embedded::EmbeddedLeases;
#[cfg(any(feature = "issuer", feature = "redis", feature = "embedded"))]
pub(crate) use self::error::Causes;
#[cfg(feature = "redis")]
pub use self::redis::{RedisLeases, RedisLeasesBuilder};
#[cfg(any(feature = "redis", feature = "embedded"))]
use self::request::WaiterLimits;
#[cfg(any(
    feature = "redis",
    feature = "embedded",
    feature = "issuer",
    feature = "client"
))]
pub(crate) use self::time::{at_least_1_ms, whole_ms};
pub use self::{
    announced::Announced,
    error::LeaseError,
    grant::{Held, Lease},
    id::{InvalidLeaseId, InvalidOwner, LeaseId, Owner},
    operate::{ListError, Operate, Page},
    request::{Acquire, Renew},
};
pub(crate) use self::{release_guard::ReleaseGuard, time::after};
use crate::token::Resource;

/// A store of leases.
pub trait Leases: Send + Sync + 'static {
    /// Grants a lease: at once, or within [`Acquire::wait`] in the order in which it was asked for.
    ///
    /// # Errors
    ///
    /// - [`LeaseError::Held`] when somebody else holds the lease, and the wait ran out.
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
    /// - [`LeaseError::Lost`] when the lease is not held under this id. Whoever holds it now keeps
    ///   it.
    /// - [`LeaseError::Unavailable`] when the store cannot be reached.
    fn release(
        &self,
        resource: &Resource,
        id: &LeaseId,
    ) -> impl Future<Output = Result<(), LeaseError>> + Send;

    /// Tells who holds the lease; `None` when nobody does.
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
