//! Client for holders of leases: acquires, renews and releases leases, and reports their loss.
//!
//! 1. A [`Holder`] acquires leases from any [`Leases`](crate::lease::Leases): over HTTP from an
//!    issuer ([`HttpLeases`]), or from a store in the same process.
//! 2. The [`LeaseGuard`] renews the lease after at most a third of its TTL. It computes the expiry
//!    on the monotonic clock, from the moment *before* each request was sent, so its expiry is
//!    never later than the store's.
//! 3. The lease is lost immediately if the store refuses a renewal, or if a renewal returns a
//!    different token although no new token was requested. If renewals fail for any other reason,
//!    the lease is lost when its TTL has elapsed.
//! 4. [`LeaseGuard::run`] drops the work as soon as the lease is lost, which can be a few
//!    milliseconds after the next holder has acquired it. A paused process detects the loss much
//!    later. Therefore, each write must carry the fencing token. Use [`LeaseGuard::headers`], or a
//!    [`TokenLayer`] for a tower client.
//!
//! # Example
//!
//! ```
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! use std::time::Duration;
//! use tower_fence::{Fence, client::Holder, lease::MemoryLeases};
//!
//! # let pool = sqlx::sqlite::SqlitePoolOptions::new()
//! #     .max_connections(1)
//! #     .connect("sqlite::memory:")
//! #     .await?;
//! # let fence = Fence::new(pool);
//! # fence.migrate().await?;
//! # let leases = MemoryLeases::new(fence);
//! // Or `HttpLeases::new("http://127.0.0.1:3000/locks")?`.
//! let holder = Holder::new(leases)
//!     .ttl(Duration::from_secs(30))
//!     .wait(Duration::from_secs(5));
//!
//! let lease = holder.acquire("sku-1").await?;
//! let headers = lease.headers();
//! let done = lease.run(async {
//!     // … client.post(url).headers(headers).send().await …
//!     headers["fencing-token"].len()
//! });
//! assert!(done.await? > 0);
//! let _ = lease.release().await; // if the release fails, the lease expires
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Deployment
//!
//! - The guard reads [`std::time::Instant`], which does not advance on Linux while the machine is
//!   suspended. If the lease is lost during suspension, the guard detects the loss only at the next
//!   renewal.
//! - Renewals run on the Tokio runtime. If blocking work occupies all threads of the runtime for
//!   longer than the TTL, the lease is lost. If the URL of the issuer contains a host name, the
//!   same applies to the threads of `spawn_blocking`, on which reqwest resolves the name for most
//!   renewals. To avoid this, use an IP address, or reqwest's feature `hickory-dns`.

mod attempts;
mod guard;
mod held_lease;
mod holder;
mod http;
mod http_error;
mod layer;
mod loss;
mod renewal;

pub use self::{
    guard::LeaseGuard,
    holder::{AcquireError, Holder, WithLeaseError},
    http::HttpLeases,
    http_error::HttpError,
    layer::{AddToken, TokenLayer},
    loss::Loss,
};
pub use crate::stale::StaleToken;
