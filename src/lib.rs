//! Fencing tokens for axum: a tower layer that refuses writes from holders of superseded leases.
//!
//! A lock with a timeout is a lease. A holder may be paused for longer than its lease lasts. When
//! the holder resumes, it still believes that it holds the lock, and overwrites the work of its
//! successor. No lock service can prevent this. The resource can prevent it: it stores the highest
//! token that it has received, and refuses lower ones.
//!
//! - [`FenceLayer`] protects the resource. It reads the token from the `Fencing-Token` header,
//!   checks the token in **one transaction** with the handler's own writes, in Postgres or SQLite,
//!   and refuses stale tokens. It accepts tokens from any issuer of increasing integers.
//! - [`issuer::router`] grants leases over HTTP, and stores them in Postgres, in Redis or in the
//!   memory of the process. Each grant has a higher token than all earlier ones, even if the lease
//!   store loses data.
//! - [`client::Holder`] acquires a lease, renews it, and stops the work if the lease is lost. It
//!   provides the HTTP headers that contain the token.
//! - SQL functions in Postgres apply the same rules for programs in other languages. They can also
//!   protect a table from unfenced writes.
//! - The program `tower-fence` provides leases to programs in other languages: see [`server`].
//!
//! Each part works without the others, and [`Fence`] works without HTTP.
//!
//! | page | contents |
//! |---|---|
//! | [`guide`] | how to choose a lock, hold a lease, and write under its token |
//! | [`deployment`] | Postgres, pools, PgBouncer, roles, Redis, limits, upgrades, metrics |
//! | [`server`] | the server program, and clients in other languages |
//! | [`proof`] | fault runs, and protocol models that show which failure each rule prevents |
//! | [`problem`] | each refusal, and how to respond to it |
//! | [`spec`] | the contract for other implementations, with test vectors |
//!
//! # Rules
//!
//! 1. The check of the token and the write are one transaction.
//! 2. A token is admissible if it is greater than the resource's `max_token`. A write with a
//!    single-use token (the default) raises `max_token` to that token. A write with a reusable
//!    token raises `max_token` to one below the token.
//! 3. After a request with an admitted token is answered, even with a failure, all older tokens are
//!    stale. The writes of a failed handler are rolled back, and its token stays usable.
//! 4. A success is never returned without a confirmed COMMIT.
//! 5. A client that disconnects leaves no open transaction and no lock behind.
//! 6. Tokens never repeat and never decrease.
//! 7. Safety does not depend on clocks. Timeouts determine how long a request waits, but never
//!    which request may write.
//! 8. If the database is unavailable, no write is admitted. If the lease store is unavailable, no
//!    lease is granted.
//! 9. Every wait of a request has a timeout.
//!
//! # Example
//!
//! ```
//! use axum::{Router, body::Body, extract::Path, http::{Request, StatusCode}, routing::post};
//! use sqlx::{Sqlite, sqlite::SqlitePoolOptions};
//! use tower::ServiceExt;
//! use tower_fence::{Fence, FenceLayer, FencedTx, PathParam, issuer, lease::MemoryLeases};
//!
//! async fn decrement(mut tx: FencedTx<Sqlite>, Path(sku): Path<String>) -> StatusCode {
//!     // Statements on `tx` commit together with the check of the token, or not at all.
//!     let update = sqlx::query("UPDATE stock SET n = n - 1 WHERE sku = $1 AND n > 0");
//!     match update.bind(sku).execute(&mut *tx).await {
//!         Ok(done) if done.rows_affected() == 1 => StatusCode::NO_CONTENT,
//!         Ok(_) => StatusCode::CONFLICT,
//!         Err(_) => StatusCode::SERVICE_UNAVAILABLE,
//!     }
//! }
//!
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! let pool = SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
//! sqlx::raw_sql("CREATE TABLE stock (sku TEXT, n INTEGER); INSERT INTO stock VALUES ('a', 9)")
//!     .execute(&pool)
//!     .await?;
//! let fence = Fence::new(pool);
//! fence.migrate().await?;
//!
//! let app: Router = Router::new()
//!     .route("/stock/{sku}/decrement", post(decrement))
//!     .route_layer(FenceLayer::new(fence.clone(), PathParam("sku")))
//!     .nest("/locks", issuer::router(MemoryLeases::new(fence)));
//!
//! // The first holder gets a lease of 100 ms, and is paused for longer than that.
//! let acquire = || {
//!     let request = Request::post("/locks/a").header("Content-Type", "application/json");
//!     request.body(Body::from(r#"{"ttl_ms": 100}"#))
//! };
//! let first = app.clone().oneshot(acquire()?).await?;
//! tokio::time::sleep(std::time::Duration::from_millis(150)).await;
//! let second = app.clone().oneshot(acquire()?).await?;
//!
//! // The second holder writes. Then the first holder resumes and writes.
//! let write = |lease: &axum::response::Response| {
//!     let token = lease.headers()["fencing-token"].clone();
//!     Request::post("/stock/a/decrement").header("Fencing-Token", token).body(Body::empty())
//! };
//! assert_eq!(app.clone().oneshot(write(&second)?).await?.status(), 204);
//! assert_eq!(app.clone().oneshot(write(&first)?).await?.status(), 412);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Features
//!
//! | feature | default | contents |
//! |---|---|---|
//! | `postgres` | yes | the fence in Postgres, and the lease store in the same database |
//! | `redis` | yes | the lease store in Redis |
//! | `redis-tls` | | TLS to Redis by rustls |
//! | `layer` | yes | the fence as a tower layer for axum, [`layer`]; requires `postgres` or `sqlite` |
//! | `issuer` | yes | the router that grants leases over HTTP, [`issuer`] |
//! | `sqlite` | | the fence in SQLite, for services on one machine |
//! | `memory` | | the lease store in memory, for a single process |
//! | `client` | | the client for holders, [`client`], which uses a remote issuer or a store in its own process |
//! | `metrics` | | counters and histograms, [`metrics`] |
//! | `testing` | | a conformance suite for your own lease stores |
//!
//! Two lease stores are in separate crates: etcd in
//! [`tower-fence-etcd`](https://docs.rs/tower-fence-etcd), and a quorum of Redis servers in
//! [`tower-fence-redlock`](https://docs.rs/tower-fence-redlock).
//!
//! For a fence without HTTP, use `default-features = false, features = ["postgres"]`. The crate
//! then does not depend on axum. For a service that only holds leases, use
//! `default-features = false, features = ["client"]`. The crate then depends neither on axum, nor
//! on a database library, nor on Redis.
//!
//! [`deployment`](deployment#tls) describes how to enable TLS.

#![cfg_attr(docsrs, feature(doc_cfg))]
// Readers enable the public features instead.
#![cfg_attr(docsrs, doc(auto_cfg(hide(feature = "_fence", feature = "_axum"))))]
// A link to an item of a disabled feature is rendered as plain text.
#![cfg_attr(
    not(all(
        feature = "_fence",
        feature = "layer",
        feature = "issuer",
        feature = "client",
        feature = "memory"
    )),
    allow(rustdoc::broken_intra_doc_links)
)]

#[cfg(all(feature = "layer", not(feature = "_fence")))]
compile_error!("the `layer` feature needs a database: `postgres` or `sqlite`");

pub mod announce;
#[cfg(feature = "_axum")]
mod body;
#[cfg(feature = "postgres")]
mod calls;
// The program and the console use it, too.
#[doc(hidden)]
pub mod chain;
#[cfg(feature = "client")]
pub mod client;
#[doc = include_str!("deployment.md")]
pub mod deployment {}

#[doc = include_str!("proof.md")]
pub mod proof {}
pub mod epochs;
pub mod events;
#[cfg(feature = "_fence")]
#[cfg_attr(docsrs, doc(cfg(any(feature = "postgres", feature = "sqlite"))))]
#[cfg_attr(
    not(all(feature = "layer", feature = "postgres", feature = "sqlite")),
    allow(
        dead_code,
        unused_imports,
        reason = "some parts are only for the layer, or only for one database"
    )
)]
pub mod fence;
// Used by tests and by the fuzz targets in `crates/verification/fuzz`.
#[cfg(all(
    any(test, fuzzing),
    feature = "redis",
    feature = "issuer",
    feature = "client"
))]
#[doc(hidden)]
pub mod fuzz;
pub mod guide;
pub mod header;
pub mod idempotency;
#[cfg(feature = "issuer")]
pub mod issuer;
mod key_id;
#[cfg(feature = "layer")]
pub mod layer;
pub mod lease;
mod live_tokens;
pub mod metrics;
mod pattern;
pub mod problem;
// The program uses it, too.
#[doc(hidden)]
pub mod sampler;
#[doc = include_str!("server.md")]
pub mod server {}
#[doc = include_str!("spec.md")]
pub mod spec {}
mod stale;
mod time;
mod token;
pub mod token_keys;
#[cfg(feature = "_fence")]
mod token_sql;
#[cfg(any(feature = "issuer", feature = "client"))]
mod wire;

#[cfg(feature = "_fence")]
#[cfg_attr(docsrs, doc(cfg(any(feature = "postgres", feature = "sqlite"))))]
pub use self::fence::{
    AdmitError, Admitted, Claim, CommitError, Fence, FenceBuilder, FenceDatabase, FencedTx,
    TokenUse,
};
pub use self::live_tokens::LiveTokens;
pub use self::pattern::{FillError, InvalidPattern, ResourcePattern};
pub use self::stale::StaleToken;
pub use self::token::{InvalidResource, InvalidToken, Resource, Token};
pub use self::token_keys::{TokenKey, TokenKeys};

#[cfg(feature = "postgres")]
pub use self::fence::PgFencedTx;
#[cfg(feature = "sqlite")]
pub use self::fence::SqliteFencedTx;
#[cfg(all(feature = "postgres", feature = "layer"))]
pub use self::layer::PgPendingWrite;
#[cfg(all(feature = "sqlite", feature = "layer"))]
pub use self::layer::SqlitePendingWrite;
#[cfg(feature = "layer")]
pub use self::layer::{FenceLayer, Idempotency, PathParam, PendingWrite};

/// The README, so that the doctests compile its code.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
