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
//! A store is used in one tokio runtime: a task of it hears of the turns of all requests that wait. A
//! request that is dropped leaves the queue and gives back what was granted to it, in a task. If the
//! runtime ends before that, both end by their time.
//!
//! A lease alone protects nothing: its holder may be paused past its end. The resource does, by
//! refusing tokens that are not newer than what it has seen.
//!
//! # Example
//!
//! ```
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! use std::time::Duration;
//! use tower_fence::{Fence, Resource, lease::{Acquire, MemoryLeases, LeaseError, Leases}};
//!
//! # let pool = sqlx::sqlite::SqlitePoolOptions::new()
//! #     .max_connections(1)
//! #     .connect("sqlite::memory:")
//! #     .await?;
//! let fence = Fence::new(pool);
//! fence.migrate().await?;
//! let leases = MemoryLeases::new(fence);
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

mod admin;
mod announced;
pub mod backend;
mod background;
mod boxed;
#[cfg(feature = "testing")]
pub mod conformance;
mod counters;
mod driver;
mod error;
#[cfg(all(
    any(test, fuzzing),
    feature = "redis",
    feature = "memory",
    feature = "issuer",
    feature = "client"
))]
pub(crate) mod fuzz;
mod grant;
mod id;
#[cfg(feature = "memory")]
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod release_guard;
mod request;
mod signed;
mod single_flight;
mod store;
#[cfg(feature = "redis")]
mod stored_id;
pub(crate) mod time;

#[cfg(feature = "memory")]
pub use self::memory::{MemoryBackend, MemoryLeases};
#[cfg(feature = "postgres")]
pub use self::postgres::{PostgresBackend, PostgresLeases};
#[cfg(feature = "redis")]
pub use self::redis::{RedisBackend, RedisLeases, RedisLeasesBuilder};
pub(crate) use self::release_guard::ReleaseGuard;
pub use self::{
    admin::{LeaseAdmin, ListError, Page},
    announced::Announced,
    backend::Backend,
    boxed::{BoxLeases, DynLeases, LeaseFuture},
    driver::{Driver, Turns},
    error::LeaseError,
    grant::{Held, Lease},
    id::{InvalidLeaseId, InvalidOwner, LeaseId, Owner},
    request::{Acquire, Renew},
    signed::Signed,
    store::Leases,
};
#[cfg(feature = "postgres")]
pub use crate::calls::LeaseDatabase;
