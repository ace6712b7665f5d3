//! The holder's side: take a lease, keep it, and hear of its loss.
//!
//! 1. A [`Holder`] takes leases from any [`Leases`](crate::lease::Leases): over HTTP from an issuer
//!    ([`HttpLeases`]), or from a store in the same process.
//! 2. The [`LeaseGuard`] renews the lease at a third of its time. Its own idea of how long it holds
//!    is counted on the monotonic clock from *before* each request was sent, so it errs on the
//!    safe side.
//! 3. A renewal that the store refuses means that the lease is lost, at once; so does one that
//!    answers another token than the lease had, where none was asked for. A renewal that does not
//!    get through means so when the time is up.
//! 4. [`LeaseGuard::run`] drops the work at that moment. A process that is paused notices too late,
//!    whatever it does; that is what the token is for. It goes along with each write:
//!    [`LeaseGuard::headers`], or a [`TokenLayer`] for a tower client.
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
//! lease.release().await?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Deployment
//!
//! - The guard's clock is that of [`std::time::Instant`]. On Linux it stands still while the machine
//!   is suspended, so a loss is then noticed at the next renewal, and not before.
//! - Renewals need the runtime: work that blocks all of its threads for longer than a lease loses
//!   it.

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
