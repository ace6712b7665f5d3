//! Lease stores, without HTTP: [`Leases`] grants leases with strictly increasing tokens.
//!
//! 1. A lease is a grant of a resource to one holder for a limited time. It ends when it is
//!    released or broken, or when it expires.
//! 2. Each grant carries a token that is higher than the tokens of all earlier grants of the
//!    resource, even if the store has lost data in between.
//! 3. An acquisition is idempotent by its lease id. While the lease is held, another request with
//!    the same id returns the same token and restarts the TTL, so a client can retry if a response
//!    was lost. If the store has lost its data since the grant, or if the token was announced and
//!    then used, the request returns a higher token instead.
//! 4. Only a caller with the lease id can renew or release the lease.
//!
//! Use a store in only one Tokio runtime, because one of its tasks receives the notifications for
//! all waiting requests. If a request is dropped, a background task removes it from the queue and
//! releases any lease that was granted to it, after three seconds if the caller has chosen the
//! lease id. If the runtime shuts down first, the queue position and the lease expire.
//!
//! A lease alone protects nothing, because its holder may be paused until after the lease has
//! expired. A fence must protect the resource and refuse stale tokens.
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
mod boxed;
#[cfg(feature = "testing")]
pub mod conformance;
mod counters;
mod driver;
mod error;
mod expiring;
mod grant;
mod id;
#[cfg(feature = "memory")]
mod memory;
mod names;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod release_guard;
mod request;
mod signed;
mod single_flight;
mod store;

#[cfg(feature = "memory")]
pub use self::memory::{MemoryBackend, MemoryLeases};
#[cfg(feature = "postgres")]
pub use self::postgres::{PostgresBackend, PostgresLeases};
#[cfg(all(
    any(test, fuzzing),
    feature = "redis",
    feature = "issuer",
    feature = "client"
))]
pub(crate) use self::redis::fuzz;
#[cfg(feature = "redis")]
pub use self::redis::{RedisBackend, RedisLeases, RedisLeasesBuilder};
pub(crate) use self::release_guard::ReleaseGuard;
pub use self::{
    admin::{LeaseAdmin, Page, live_tokens},
    announced::Announced,
    backend::Backend,
    boxed::BoxLeases,
    driver::{Driver, Turns},
    error::{LeaseError, TooMuchChange},
    grant::{Held, Lease},
    id::{InvalidLeaseId, InvalidOwner, LeaseId, Owner},
    request::{Acquire, Renew},
    signed::Signed,
    store::Leases,
};
#[cfg(feature = "postgres")]
pub use crate::calls::LeaseDatabase;
