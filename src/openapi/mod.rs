//! The routes as an [OpenAPI] 3.1 document, made from the code: of [`utoipa`], for documentation, for clients
//! in other languages, and for tests.
//!
//! - [`Issuer::openapi`](crate::issuer::Issuer::openapi) is the document of the issuer's router, with the limits that
//!   were set; [`operator_openapi`](crate::issuer::Issuer::operator_openapi) has the routes for operators, too.
//!   Where [`serve_openapi`](crate::issuer::Issuer::serve_openapi) says so, the router serves it, at `/openapi.json`
//!   below the path at which it is nested. [`amend_openapi`](crate::issuer::Issuer::amend_openapi) adds what stands in
//!   front of it.
//! - [`Issuer::openapi_router`](crate::issuer::Issuer::openapi_router) is the router and its document in one, to be
//!   nested in an application's own [`OpenApiRouter`](utoipa_axum::router::OpenApiRouter).
//! - [`FenceLayer::describe`](crate::FenceLayer::describe) adds to an application's operations what the layer does to
//!   them: the header `Fencing-Token`, and each refusal.
//! - [`add_problems`] adds the refusals that handlers answer themselves, and [`custom_problem`] describes those of the
//!   application's own types.
//!
//! Each [type of problem](crate::problem) is a schema of its own, by the constant value of its `type`; an answer that may be
//! one of several is a `oneOf` them.
//!
//! JSON Schema counts the characters of a text. Where a limit is one of bytes (resources, owners), the description
//! says so, and a text of other characters than ASCII may be refused though its schema takes it.
//!
//! # Example
//!
#![cfg_attr(
    all(feature = "issuer", feature = "sqlite", feature = "memory"),
    doc = "```"
)]
#![cfg_attr(
    not(all(feature = "issuer", feature = "sqlite", feature = "memory")),
    doc = "```ignore"
)]
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! use axum::{Router, extract::Path};
//! use sqlx::Sqlite;
//! use tower_fence::{Fence, FenceLayer, FencedTx, PathParam, issuer::Issuer, lease::MemoryLeases};
//! use utoipa_axum::{router::OpenApiRouter, routes};
//!
//! /// Takes one away.
//! #[utoipa::path(post, path = "/stock/{sku}/decrement", params(("sku" = String, Path)))]
//! async fn decrement(mut tx: FencedTx<Sqlite>, Path(sku): Path<String>) {
//!     // …
//! }
//!
//! # let pool = sqlx::sqlite::SqlitePoolOptions::new()
//! #     .max_connections(1)
//! #     .connect("sqlite::memory:")
//! #     .await?;
//! let fence = Fence::new(pool);
//! let layer = FenceLayer::new(fence.clone(), PathParam("sku"));
//!
//! let mut stock = OpenApiRouter::new().routes(routes!(decrement));
//! layer.describe(stock.get_openapi_mut());
//! let issuer = Issuer::new(MemoryLeases::new(fence));
//! let (app, api): (Router, _) = OpenApiRouter::new()
//!     .merge(stock.route_layer(layer))
//!     .nest("/locks", issuer.openapi_router())
//!     .split_for_parts();
//!
//! let decrement = api.paths.paths["/stock/{sku}/decrement"].post.as_ref().unwrap();
//! assert!(decrement.responses.responses.contains_key("412"));
//! assert!(api.paths.paths.contains_key("/locks/{resource}"));
//! # drop(app);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [OpenAPI]: https://spec.openapis.org/oas/v3.1.1.html

#![allow(dead_code, reason = "the features decide which of these are used")]

mod header;
mod operations;
mod problem;
mod values;

#[cfg(any(feature = "issuer", feature = "layer"))]
pub(crate) use self::operations::{
    add_schemas, answer_header, answer_problems, operations, take_header,
};
#[cfg(test)]
pub(crate) use self::problem::fits;
#[cfg(feature = "layer")]
pub(crate) use self::{
    header::optional,
    values::{fencing_tokens, idempotency_key, replayed},
};
#[cfg(feature = "issuer")]
pub(crate) use self::{
    header::{cache_control, required},
    values::{fencing_token, text},
};
pub use self::{operations::add_problems, problem::custom_problem};
