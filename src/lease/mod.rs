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
mod give_back;
mod id;
#[cfg(any(feature = "redis", feature = "embedded"))]
mod memory;
mod operate;
#[cfg(feature = "redis")]
mod redis;
mod request;

use std::{error::Error, sync::Arc, time::Duration};

pub use self::announced::Announced;
#[cfg(feature = "embedded")]
pub use self::embedded::EmbeddedLeases;
pub(crate) use self::give_back::GiveBack;
pub use self::id::{InvalidLeaseId, InvalidOwner, LeaseId, Owner};
pub use self::operate::{ListError, Operate, Page};
#[cfg(feature = "redis")]
pub use self::redis::{RedisLeases, RedisLeasesBuilder};
#[cfg(any(feature = "redis", feature = "embedded"))]
use self::request::WaiterLimits;
pub use self::request::{Acquire, Renew};
use crate::{
    announce::Announce,
    header::FencingToken,
    token::{Resource, Token},
};

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

    /// These leases, with each grant, and each renewal with a new token, announced before it is
    /// answered: `resources`, a `Fence`, makes everyone older dead first and waits for a write in
    /// flight. So no older holder can write between the grant and the new holder's first write,
    /// whatever the new holder reads there.
    ///
    /// Where that fails the answer is [`LeaseError::Unavailable`]. A lease whose id was chosen is kept:
    /// who asks again with it, or renews, has its token announced then. Any other is given back.
    ///
    /// The resource has the last word: a grant whose token is not above all that the resource has
    /// seen (a token from elsewhere, or a forged one) is answered with a higher one; a renewal is
    /// answered [`LeaseError::Lost`] then, since what its holder has read is not covered. **Without
    /// announcements a store cannot know** that a resource has seen higher tokens than its own: it
    /// goes on to grant leases whose writes are all refused as stale. Announce, or take the fence
    /// back with `Fence::reset`.
    ///
    /// Each name that was ever locked keeps a row of the fence's table: rows cannot be removed yet.
    /// Do not hand out leases on names that a client may make up.
    fn announced_to<A: Announce>(self, resources: A) -> Announced<Self, A>
    where
        Self: Sized,
    {
        Announced::new(self, resources)
    }
}

/// A lease that is held, as its holder sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lease {
    /// The resource.
    pub resource: Resource,
    /// What renews and releases it. A secret.
    pub id: LeaseId,
    /// The token of the grant.
    pub token: Token,
    /// How long the lease lasts. Count from before the store was asked, to be on the safe side.
    pub ttl: Duration,
}

impl Lease {
    /// The value of the `Fencing-Token` header for writes under this lease.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        FencingToken::new(self.token).with_resource(self.resource.clone())
    }
}

/// A lease that is held, as everybody may see it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Held {
    /// The token of the grant.
    pub token: Token,
    /// Who holds it.
    pub owner: Option<Owner>,
    /// What is left of its time.
    pub ttl: Duration,
    /// How many wait in line for it.
    pub waiters: u64,
}

/// Why a store did not do what it was asked.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// Somebody else holds the lease.
    #[error("the lease on {resource} is held by another")]
    Held {
        /// The resource.
        resource: Resource,
        /// What is left of the lease's time and of its lock delay, unless it is renewed or
        /// released.
        retry_after: Duration,
    },
    /// The lease is not held under this id: it was released, it ran out, or it never was.
    #[error("the lease on {resource} is not held under this id")]
    Lost {
        /// The resource.
        resource: Resource,
    },
    /// Too many wait for the lease, or for any lease.
    #[error("too many wait for the lease on {resource}, or for any lease")]
    TooManyWaiters {
        /// The resource.
        resource: Resource,
    },
    /// There is no token above those that the resource has seen. `Fence::reset` is the cure.
    #[error("{resource} has seen token {max_token}, above which none is left")]
    Exhausted {
        /// The resource.
        resource: Resource,
        /// The highest token that was seen.
        max_token: i64,
    },
    /// The store does not take such a request: a limit of an issuer, for example.
    #[error("the request is invalid, `{field}`: {detail}")]
    Invalid {
        /// The part of the request.
        field: String,
        /// What is wrong with it.
        detail: String,
    },
    /// The store, or the source of its epochs, cannot be reached.
    #[error("the lease store is unavailable")]
    Unavailable(#[source] Arc<dyn Error + Send + Sync>),
}

impl LeaseError {
    pub(crate) fn unavailable(cause: impl Error + Send + Sync + 'static) -> Self {
        Self::Unavailable(Arc::new(cause))
    }
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

/// More than any clock has to count.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Whole milliseconds, rounded up, at least 1, at most a century.
#[cfg(any(feature = "redis", feature = "embedded", feature = "client"))]
pub(crate) fn whole_ms(time: Duration) -> u64 {
    let ms = time.min(CENTURY).as_nanos().div_ceil(1_000_000);
    u64::try_from(ms).unwrap_or(u64::MAX).max(1)
}

/// This long from now, at most a century.
pub(crate) fn after(time: Duration) -> tokio::time::Instant {
    let now = tokio::time::Instant::now();
    now.checked_add(time.min(CENTURY)).unwrap_or(now)
}

#[cfg(all(test, any(feature = "redis", feature = "embedded")))]
mod tests {
    use super::*;

    #[test]
    fn a_ttl_is_rounded_up_and_never_overflows() {
        assert_eq!(whole_ms(Duration::ZERO), 1);
        assert_eq!(whole_ms(Duration::from_micros(1_001)), 2);
        assert_eq!(u128::from(whole_ms(Duration::MAX)), CENTURY.as_millis());
    }
}
