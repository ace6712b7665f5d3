//! Fencing of axum handlers, as a tower layer.
//!
//! [`FenceLayer`] refuses stale writers before the handler runs, and commits the handler's writes
//! together with the token check.
//!
//! 1. A request with an unsafe method needs one token for each of its resources. A request with a
//!    safe method (GET, HEAD, QUERY) may carry tokens, which make it a *fenced read* (see below).
//!    OPTIONS and TRACE requests, which include CORS preflights, pass without a check. If the layer
//!    [verifies tokens](FenceLayer::verify_with), it first refuses each token that the issuer has
//!    not signed. Put WebSockets outside of the layer, because over HTTP/2 clients open them with
//!    CONNECT, an unsafe method, and a callback that keeps the transaction occupies its connection.
//! 2. The layer reads the body before it admits the token, within limits of size and time. The
//!    request of a slow client therefore holds neither a connection nor a row lock. If the layer
//!    refuses a request before it has read the body, it responds immediately and reads the rest of
//!    the body in the background, up to four times the limit.
//! 3. The layer admits the token in a transaction. If a request has several tokens, the layer
//!    admits all of them or none. The handler gets the transaction from the extractor
//!    [`FencedTx`](crate::FencedTx). A handler without that extractor is fenced as well.
//! 4. If the status of the response is below 400, the layer commits, unless the handler [requests a
//!    rollback](Rollback) or the function of [`commit_if`](FenceLayer::commit_if) decides
//!    otherwise. After any other outcome, including a panic and a timeout, the layer rolls back and
//!    raises the fence. The token stays usable, and all older tokens become stale. A response that
//!    rejects the client without serving it does not raise the fence (see below).
//! 5. The layer responds after the transaction has ended, and never reports a success without a
//!    confirmed COMMIT. If the handler exceeds the
//!    [`hold_timeout`](crate::FenceBuilder::hold_timeout), the layer responds at most half a second
//!    later, and ends the transaction in the background.
//! 6. If the layer is [`deferred`](FenceLayer::deferred), the handler decides when the token is
//!    admitted, with a [`PendingWrite`].
//! 7. If the layer is [`idempotent`](FenceLayer::idempotent) and the request has an idempotency
//!    key, a repeated write gets the stored response of the first write.
//!
//! # Example
//!
//! ```
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! use axum::{Router, body::Body, extract::Path, http::Request, routing::post};
//! use sqlx::Sqlite;
//! use tower::ServiceExt;
//! use tower_fence::{Fence, FenceLayer, FencedTx, PathParam};
//!
//! async fn decrement(mut tx: FencedTx<Sqlite>, Path(sku): Path<String>) {
//!     sqlx::query("UPDATE stock SET n = n - 1 WHERE sku = $1")
//!         .bind(sku)
//!         .execute(&mut *tx)
//!         .await
//!         .expect("one row");
//! }
//!
//! let pool = sqlx::sqlite::SqlitePoolOptions::new()
//!     .max_connections(1)
//!     .connect("sqlite::memory:")
//!     .await?;
//! sqlx::raw_sql("CREATE TABLE stock (sku TEXT, n INTEGER); INSERT INTO stock VALUES ('a', 9)")
//!     .execute(&pool)
//!     .await?;
//! let fence = Fence::new(pool);
//! fence.migrate().await?;
//!
//! let app: Router = Router::new()
//!     .route("/stock/{sku}/decrement", post(decrement))
//!     .route_layer(FenceLayer::new(fence, PathParam("sku")));
//!
//! let request = |token| {
//!     Request::post("/stock/a/decrement").header("Fencing-Token", token).body(Body::empty())
//! };
//! assert_eq!(app.clone().oneshot(request("2")?).await?.status(), 200);
//! assert_eq!(app.clone().oneshot(request("1")?).await?.status(), 412);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Responses that do not raise the fence
//!
//! The [contract](crate::spec#the-effect-of-a-response) lists the responses that leave the fence
//! unchanged. A response with one of the statuses of an invalid request nevertheless raises the
//! fence if the handler has used the connection of its [`FencedTx`](crate::FencedTx) or of its
//! [`PendingWrite`] for a statement. The layer then assumes that the response depends on data that
//! the handler has seen. If a handler derives such a response from data that it has read elsewhere,
//! an older holder may still overwrite that data. Read in the transaction instead, or respond with
//! 409.
//!
//! Every other response raises the fence, but the layer first rolls back the transaction. Between
//! these two steps, a write with an older token that waits for the row lock in another process may
//! still succeed. To rely on a 404 or a 409, use a [fenced read](#fenced-reads). A redirect counts
//! as a success, so the layer commits. If an extractor redirects unauthenticated clients to a login
//! page, put that extractor outside of the layer.
//!
//! # Fenced reads
//!
//! The [contract](crate::spec#the-effect-of-a-response) describes fenced reads, and the [guide to
//! reading](crate::guide::reading_before_writing) describes what is certain after each response.
//! The read waits for a write that is in progress, and older writers that arrive later wait for the
//! read. The handler runs once, with the timeout of a write, and must not write. It may read on
//! [`FencedTx`](crate::FencedTx) or elsewhere.
//!
//! A request with a safe method and without a token has no transaction, and the layer does not
//! limit its duration. A handler that extracts `Option<FencedTx>` serves both kinds of reads.
//!
//! # Deployment
//!
//! The [guarantees](crate::guide::guarantees) describe what the layer does not protect, and
//! [`deployment`](crate::deployment#sizing) describes how large the pool must be.
//!
//! - A timeout in a layer outside of this layer drops the request, like a client that disconnects.
//!   The transaction is rolled back, but the fence is not raised, so older tokens may still be
//!   valid after the response of that layer. If the COMMIT was in progress, the write may have
//!   taken effect. Use [`hold_timeout`](crate::FenceBuilder::hold_timeout) instead, or a timeout
//!   inside of this layer.
//! - A layer inside of this layer must not call the handler again after a failure, as
//!   `tower::retry` does. The second call gets the same transaction, with the statements of the
//!   first call, and both are committed. If the layer is deferred and the request has no
//!   idempotency key, the second call fails. Retry outside of this layer, or in the handler with a
//!   savepoint.
//! - axum's own `DefaultBodyLimit` (2 MB) still applies inside the handler's extractors.
//! - With `Router::layer`, the layer also sees requests that match no route. If the resource comes
//!   from the path ([`PathParam`], [`ResourcePattern`](crate::ResourcePattern)), the layer responds
//!   with 404 to unsafe requests without a route, before they reach the fallback. If the resource
//!   comes from anything else, a 404 of the fallback raises the fence. Prefer
//!   `Router::route_layer`.
//! - With `Router::route_layer`, the layer also sees methods that the route does not support. It
//!   responds to a stale token with 412, although the route would respond with 405. With
//!   `MethodRouter::route_layer`, as in `get(show).put(set).route_layer(layer)`, the layer does not
//!   see those methods.
//! - Each resource that a request names with an admissible token gets a row, even if the handler
//!   then fails, unless the response rejects the client. Outside of the layer, authenticate clients
//!   and validate the names that a client can invent.
//! - [`deployment`](crate::deployment#alerts) describes the log lines of the layer, and
//!   [`metrics`](crate::metrics) its metrics.

mod claims;
mod extract;
mod failure;
mod idempotency;
mod on_begin;
mod path;
mod pending;
mod refusal;
mod report;
mod resource;
mod service;
mod settle;
mod stored;
mod verdict;
mod verification;

use std::{sync::Arc, time::Duration};

use axum::response::Response;
use derive_where::derive_where;
use futures_util::future::BoxFuture;
use http::{HeaderName, request::Parts};
use tower_layer::Layer;

#[cfg(feature = "postgres")]
pub use self::pending::PgPendingWrite;
#[cfg(feature = "sqlite")]
pub use self::pending::SqlitePendingWrite;
#[cfg(test)]
pub(crate) use self::report::captured;
pub use self::{
    extract::NoTransaction,
    failure::DatabaseError,
    idempotency::Idempotency,
    path::{FromPath, PathParam, PathParams},
    pending::PendingWrite,
    refusal::{BodyError, Refusal},
    resource::{ResourceError, ResourceFrom, Resources},
    service::FenceService,
    stored::UnstorableResponse,
    verdict::Rollback,
    verification::Verification,
};
use self::{on_begin::Hook, verdict::CommitIf};
use crate::{
    fence::{Fence, FenceDatabase, TokenUse},
    header::FENCING_TOKEN,
};

/// Tower layer that puts a [`Fence`] in front of axum handlers.
///
/// See the [module](self) for its rules and an example.
#[derive_where(Clone; R)]
#[derive_where(Debug)]
pub struct FenceLayer<DB: FenceDatabase, R> {
    fence: Fence<DB>,
    #[derive_where(skip(Debug))]
    resource_from: R,
    header: HeaderName,
    token_use: TokenUse,
    body_limit_bytes: usize,
    body_timeout: Duration,
    idempotency: Option<Arc<Idempotency>>,
    deferred: bool,
    known_epochs: bool,
    verification: Option<Verification>,
    #[derive_where(skip(Debug))]
    on_begin: Option<Hook<DB>>,
    #[derive_where(skip(Debug))]
    commit_if: Option<CommitIf>,
    #[derive_where(skip(Debug))]
    map_refusal: Option<Arc<MapRefusal>>,
}

/// The function of [`FenceLayer::map_refusal`].
type MapRefusal = dyn Fn(&Refusal, Response) -> Response + Send + Sync;

impl<DB: FenceDatabase, R: ResourceFrom> FenceLayer<DB, R> {
    /// Creates a layer for single-use tokens.
    ///
    /// `resource_from` determines the resource of a request. It can be a
    /// [`ResourcePattern`](crate::ResourcePattern) or a [`PathParam`] (both read the path), a
    /// closure over the request's parts, or an array of these. See [`ResourceFrom`].
    pub const fn new(fence: Fence<DB>, resource_from: R) -> Self {
        Self {
            fence,
            resource_from,
            header: FENCING_TOKEN,
            token_use: TokenUse::SingleUse,
            body_limit_bytes: 2 * 1024 * 1024,
            body_timeout: Duration::from_secs(10),
            idempotency: None,
            deferred: false,
            known_epochs: false,
            verification: None,
            on_begin: None,
            commit_if: None,
            map_refusal: None,
        }
    }

    /// Admits any number of writes with one token, until a newer token makes it stale. Default: one
    /// write.
    ///
    /// With this option, if a client or a proxy repeats a request, the write is applied twice.
    #[must_use]
    pub const fn reusable(mut self) -> Self {
        self.token_use = TokenUse::Reusable;
        self
    }

    /// Leaves the admission to the handler, which extracts a [`PendingWrite`] instead of a
    /// [`FencedTx`](crate::FencedTx). Default: the layer admits the token before the handler runs.
    ///
    /// If the handler first validates the request and refuses it, the request causes no query of
    /// the fence. A handler with a single statement needs no transaction around the statement. If a
    /// token is stale according to the cache of this process, the layer refuses the token before
    /// the handler runs.
    #[must_use]
    pub const fn deferred(mut self) -> Self {
        self.deferred = true;
        self
    }

    /// Refuses tokens whose epoch this database has never assigned, with 403 `unknown-epoch`.
    /// Default: tokens of any issuer are accepted.
    ///
    /// Use this option only if all tokens come from this crate's issuers over the same database:
    /// `PostgresLeases`, or another store that takes its epochs from this fence. The option limits
    /// the effect of a forged token, which cannot supersede a token of a later epoch. A token of
    /// another issuer is accepted only if its number happens to lie in an assigned epoch.
    ///
    /// The layer caches the highest assigned epoch of each of 256 groups of resources. Only a token
    /// above the cached epoch causes a query, which needs a connection of the pool, and also reads
    /// the highest announced token of the resource, which may be above all epochs.
    #[must_use]
    pub const fn issued_by_this_database(mut self) -> Self {
        self.known_epochs = true;
        self
    }

    /// Refuses tokens that the issuer has not [signed](crate::token_keys) with one of these keys,
    /// with 403 `forged-token`. Default: any integer is accepted.
    ///
    /// The argument is [`TokenKeys`](crate::TokenKeys), or a [`Verification`] if the layer must
    /// still accept unsigned tokens. The [guide](crate::guide::signed_tokens) shows a layer and its
    /// issuer.
    ///
    /// The layer verifies the header before it determines the resource, reads the body, looks up a
    /// stored response or uses the database. Each member of the header needs the parameters
    /// `resource`, `key` and `mac`, exactly as the issuer has written them. The response gives the
    /// same reason for every invalid token, and the log contains the details.
    ///
    /// Without verification, a client can block a resource with an arbitrarily high number: in a
    /// write, even if the write fails, or in a fenced read, which needs no permission to write. A
    /// signed token of another resource or deployment, or with an increased number, is refused.
    /// Verification does not prevent [replay](crate::guide::signed_tokens#the-sender-of-a-token). A
    /// client can send a signed token until it is stale, even after the lease has expired.
    ///
    /// The layer also verifies the token of a repetition under an idempotency key. If the key that
    /// signed the token has been rotated out, the client gets the stored response only if it
    /// repeats the request under a new lease, with the same idempotency key.
    #[must_use]
    pub fn verify_with(mut self, keys: impl Into<Verification>) -> Self {
        self.verification = Some(keys.into());
        self
    }

    /// Runs a function of the request and the connection in each fenced transaction, after the
    /// admission and before the handler.
    ///
    /// Use this option for settings that the handler's statements depend on, such as a role or the
    /// tenant of row-level security. The [guide](crate::guide::tenants) contains an example.
    ///
    /// If the function fails, the response is the same as for a failed statement of the handler
    /// ([`DatabaseError`]). Nothing is written, the token stays usable, and the fence is unchanged.
    /// The fence's [`hold_timeout`](crate::FenceBuilder::hold_timeout) limits this function and the
    /// handler together. If they exceed it, the response is 503 `handler-timeout`.
    ///
    /// If the layer is [`deferred`](Self::deferred), the function runs when the handler begins the
    /// transaction, and [`PendingWrite::write`] uses an open transaction instead of a single
    /// statement. The function runs neither for a read without a token, which has no transaction,
    /// nor for the replay of a stored response.
    #[must_use]
    pub fn on_begin<F>(mut self, hook: F) -> Self
    where
        F: for<'a> Fn(&'a Parts, &'a mut DB::Connection) -> BoxFuture<'a, sqlx::Result<()>>
            + Send
            + Sync
            + 'static,
    {
        self.on_begin = Some(Arc::new(hook));
        self
    }

    /// Sets the function that decides whether the layer commits after a response with a status
    /// below 400. Default: the layer commits, unless the response has the extension [`Rollback`].
    ///
    /// GraphQL, JSON-RPC and gRPC report errors with status 200. If the function returns `false`,
    /// the response counts as a failure. The layer then rolls back the handler's writes, older
    /// tokens become stale, the token stays usable, and the response is not stored under an
    /// idempotency key. The client gets the response unchanged. If the status is 400 or above, the
    /// layer rolls back a write whatever the function returns. After a [fenced
    /// read](crate::layer#fenced-reads) with a status from 400 to 499, `false` prevents the commit.
    ///
    /// The function sees the status, the headers, the extensions and the unread body. If it panics,
    /// the layer treats that as a panic of the handler.
    ///
    /// ```
    /// # fn layer(fence: tower_fence::Fence<sqlx::Postgres>) -> impl Clone {
    /// use tower_fence::{FenceLayer, PathParam};
    ///
    /// // A failed unary gRPC call has its status in the headers.
    /// FenceLayer::new(fence, PathParam("sku")).commit_if(|response| {
    ///     response.headers().get("grpc-status").is_none_or(|status| status == "0")
    /// })
    /// # }
    /// ```
    #[must_use]
    pub fn commit_if<F>(mut self, commits: F) -> Self
    where
        F: Fn(&Response) -> bool + Send + Sync + 'static,
    {
        self.commit_if = Some(Arc::new(commits));
        self
    }

    /// Sets the function that renders each [`Refusal`] in the application's own format. Default:
    /// problem+json.
    ///
    /// The arguments are the refusal and the response with the problem document. The function
    /// returns the response for the client. The layer calls it for its own refusals, for refusals
    /// that a handler returns, such as the error of [`PendingWrite::begin`], and for a
    /// [`DatabaseError`] or a [`WriteError`](crate::fence::WriteError) whose response is 503
    /// `fence-busy` or `store-unavailable`. The layer does not call it for the errors of extractors
    /// or for other errors of a handler. When the layer calls the function, the transaction has
    /// ended, and the refusal has been logged and counted. The function therefore affects only the
    /// rendering. The
    /// [guide](crate::guide::graphql_and_grpc#refusals-in-the-format-of-the-protocol) contains an
    /// example for GraphQL.
    #[must_use]
    pub fn map_refusal<F>(mut self, render: F) -> Self
    where
        F: Fn(&Refusal, Response) -> Response + Send + Sync + 'static,
    {
        self.map_refusal = Some(Arc::new(render));
        self
    }

    /// Sets the name of the header that carries the tokens. Default: [`FENCING_TOKEN`].
    #[must_use]
    pub fn header(mut self, name: HeaderName) -> Self {
        self.header = name;
        self
    }

    /// Sets the maximum length of a fenced request's body, in bytes. Default: 2 MiB.
    #[must_use]
    pub const fn body_limit_bytes(mut self, limit: usize) -> Self {
        self.body_limit_bytes = limit;
        self
    }

    /// Sets the timeout for reading a fenced request's body. Default: 10 s.
    #[must_use]
    pub const fn body_timeout(mut self, limit: Duration) -> Self {
        self.body_timeout = limit;
        self
    }

    /// Enables idempotency keys. A write with an `Idempotency-Key` is applied once, and every
    /// repetition gets the response of the first request. Default: the header is ignored.
    ///
    /// [The guide](crate::guide::idempotency) describes when a client may repeat a request. If the
    /// request has a key, the layer itself must commit, so that the response is stored in the same
    /// transaction: [`FencedTx::commit`](crate::FencedTx::commit) returns an error. The layer reads
    /// the whole body of the response before COMMIT, within the
    /// [`hold_timeout`](crate::FenceBuilder::hold_timeout), so a route that streams its responses
    /// must not accept keys. The handler, and middleware inside of the layer, must not leave
    /// another role set with `SET LOCAL ROLE`, because that role may have no privilege to store the
    /// response. Set the role in [`on_begin`](Self::on_begin) instead. They must not set the
    /// transaction to READ ONLY either.
    #[must_use]
    pub fn idempotent(mut self, keys: Idempotency) -> Self {
        self.idempotency = Some(Arc::new(keys));
        self
    }
}

impl<S, DB: FenceDatabase, R: Clone> Layer<S> for FenceLayer<DB, R> {
    type Service = FenceService<S, DB, R>;

    fn layer(&self, inner: S) -> Self::Service {
        FenceService::new(inner, self.clone())
    }
}
