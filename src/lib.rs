//! Fencing tokens for axum: the half of a distributed lock that makes it safe.
//!
//! A lock with a timeout is a lease. A holder that is paused for longer than its lease wakes up,
//! still believes that it holds the lock, and overwrites its successor. No lock service can
//! prevent that; only the resource that is written can, by refusing every token that is not newer
//! than what it has seen.
//!
//! - [`FenceLayer`] makes the resource safe: it reads the `Fencing-Token` header, checks the token
//!   in Postgres (or SQLite) in **one transaction** with the handler's own writes, and refuses
//!   stale writers. It takes the tokens of any issuer of increasing integers.
//! - [`issuer::router`] makes the tokens: leases in Redis (or in the process), each grant with a
//!   token that is higher than all before it, whatever Redis has lost.
//!
//! - [`client::Holder`] takes a lease and keeps it, says when it is lost, and sends the token along.
//!
//! Each part works without the others, and [`Fence`] works without HTTP.
//!
//! | where to read on | |
//! |---|---|
//! | [`guide`] | which lock a problem needs, how to be a good holder, recipes |
//! | [`deployment`] | Postgres, pools, PgBouncer, roles, Redis, limits, upgrades, metrics |
//! | [`proof`] | the protocols as models, what breaks without each of their rules, and runs under faults |
//! | [`problem`] | each refusal, and what to do about it |
//! | [`spec`] | the contract, for other implementations, with test vectors |
//!
//! # Rules
//!
//! 1. Check and write are one transaction.
//! 2. A token is admissible when it is greater than the resource's `max_token`. After a single-use
//!    write (the default) `max_token` is the token; after a reusable one it is one below.
//! 3. Once a request was admitted and answered, even with a failure, everyone older is dead. A
//!    failed handler's writes are rolled back, and its token stays usable.
//! 4. Success is never claimed without a confirmed COMMIT.
//! 5. A client that goes away leaves no open transaction and no held lock behind.
//! 6. Tokens never repeat and never go back.
//! 7. No safety rests on a clock: time limits decide how long someone waits, never who may write.
//! 8. No database, no write; no Redis, no new lease.
//! 9. Every wait has a limit.
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
//!     // What is done on `tx` commits together with the check of the token, or not at all.
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
//! // The first holder gets a lease of 100 ms and is paused for longer.
//! let acquire = || {
//!     let request = Request::post("/locks/a").header("Content-Type", "application/json");
//!     request.body(Body::from(r#"{"ttl_ms": 100}"#))
//! };
//! let first = app.clone().oneshot(acquire()?).await?;
//! tokio::time::sleep(std::time::Duration::from_millis(150)).await;
//! let second = app.clone().oneshot(acquire()?).await?;
//!
//! // The second one writes; then the first one wakes up.
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
//! | feature | default | what |
//! |---|---|---|
//! | `postgres` | yes | the fence in Postgres, and the lease store beside it |
//! | `redis` | yes | the lease store in Redis |
//! | `redis-tls` | | TLS to Redis by rustls, with authorities and client certificates of your own |
//! | `layer` | yes | the fence as a tower layer for axum, [`layer`]; with `postgres` or `sqlite` |
//! | `issuer` | yes | the router that grants leases over HTTP, [`issuer`] |
//! | `sqlite` | | the fence in SQLite, for one machine |
//! | `memory` | | the lease store in the process, for one process |
//! | `client` | | the holder's side, [`client`]: over an issuer elsewhere, or a store in the process |
//! | `console` | | a page for operators, [`console`]: leases, fences, and what happens, live |
//! | `metrics` | | counters and histograms, see [`metrics`] |
//!
//! Leases in etcd are in a crate of their own, [`tower-fence-etcd`](https://docs.rs/tower-fence-etcd).
//!
//! A fence without HTTP needs `default-features = false, features = ["postgres"]`, and has no axum among its dependencies.
//! A service that only holds leases needs `default-features = false, features = ["client"]`, and has
//! no axum, no database and no Redis among its dependencies.
//!
//! TLS is that of the clients: enable it with a feature of `sqlx` (`tls-rustls`, …), `redis`
//! (`tokio-rustls-comp`, …, or `redis-tls` here) or `reqwest` (`rustls`, `native-tls`) in your own `Cargo.toml`.

#![cfg_attr(docsrs, feature(doc_cfg))]
// A link to a part that is switched off is plain text.
#![cfg_attr(
    not(all(
        feature = "_fence",
        feature = "layer",
        feature = "issuer",
        feature = "client",
        feature = "memory",
        feature = "console"
    )),
    allow(rustdoc::broken_intra_doc_links)
)]

#[cfg(all(feature = "layer", not(feature = "_fence")))]
compile_error!("the feature `layer` needs a database: `postgres` or `sqlite`");

pub mod announce;
#[cfg(feature = "_axum")]
mod body;
#[cfg(feature = "postgres")]
mod calls;
mod chain;
#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "console")]
pub mod console;
#[doc = include_str!("deployment.md")]
pub mod deployment {}

#[doc = include_str!("proof.md")]
pub mod proof {}
pub mod epochs;
#[cfg_attr(
    not(feature = "layer"),
    allow(dead_code, reason = "the layer reports most events")
)]
mod feed;
#[cfg(feature = "_fence")]
#[cfg_attr(
    not(all(feature = "layer", feature = "postgres", feature = "sqlite")),
    allow(
        dead_code,
        unused_imports,
        reason = "parts serve the layer, or one of the databases, alone"
    )
)]
pub mod fence;
// For the fuzz targets in `crates/verification/fuzz`, and for tests.
#[cfg(all(
    any(test, fuzzing),
    feature = "redis",
    feature = "memory",
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
#[doc = include_str!("server.md")]
pub mod server {}
#[doc = include_str!("spec.md")]
pub mod spec {}
mod stale;
mod token;
pub mod token_keys;
#[cfg(feature = "_fence")]
mod token_sql;
#[cfg(any(feature = "issuer", feature = "client"))]
mod wire;

#[cfg(feature = "_fence")]
pub use self::fence::{
    AdmitError, Admitted, Claim, Claims, CommitError, Fence, FenceBuilder, FenceDatabase, FencedTx,
    TokenUse,
};
pub use self::live_tokens::LiveTokens;
pub use self::pattern::{FillError, InvalidPattern, ResourcePattern};
pub use self::stale::StaleToken;
pub use self::token::{InvalidResource, InvalidToken, InvalidZxid, Resource, Token};
pub use self::token_keys::{SignedToken, TokenKey, TokenKeys};

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

/// The code in the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
