//! Fencing of axum handlers, as a tower layer: [`FenceLayer`] refuses stale writers before the
//! handler runs, and commits the handler's writes together with the token check.
//!
//! 1. A request with an unsafe method needs one token for each of its resources. A request with a
//!    safe method (GET, HEAD, QUERY) may carry tokens. It is then a *fenced read* (see below): once
//!    it is answered, all older tokens are stale. OPTIONS and TRACE requests, and so CORS
//!    preflights, pass without a check, whether or not they carry a token. If the layer [verifies
//!    tokens](FenceLayer::verify_with), a token that the issuer has not signed is refused before
//!    anything else happens.
//! 2. The body is read before the token is admitted, within a limit of size and time, so that a
//!    slow client holds neither a connection nor a row lock. A request that is refused earlier is
//!    answered at once. The rest of its body is read in the background, up to four times the limit:
//!    a client that sends its whole request before it reads would otherwise not receive the answer.
//! 3. The token is admitted in a transaction; of several tokens, either all are admitted or none.
//!    The handler gets the transaction from the extractor [`FencedTx`](crate::FencedTx). A handler
//!    that does not extract it is fenced all the same.
//! 4. A status below 400 commits, unless the handler [demands a rollback](Rollback) or the layer
//!    [decides otherwise](FenceLayer::commit_if). Any other outcome, including a panic and a
//!    timeout, rolls back and raises the fence: the token stays usable, and all older tokens are
//!    stale from then on. Responses that reject the client without serving it do not raise the
//!    fence (see below).
//! 5. The response leaves after the transaction has ended. A success is never answered without a
//!    confirmed COMMIT. If the handler exceeds its time limit, the client is answered within half a
//!    second of that limit, while the transaction is ended in the background.
//! 6. Behind a [`deferred`](FenceLayer::deferred) layer, the handler gets a [`PendingWrite`] and
//!    admits the token when it is ready: with a transaction, or together with a single statement.
//! 7. If the layer is [`idempotent`](FenceLayer::idempotent) and the request has an idempotency
//!    key, the key is looked up first, in the same transaction. A repeated write gets the stored
//!    response of the first one. The response of a new write is stored by the COMMIT of that write.
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
//! A token is a number, and the highest one supersedes all others. So that a client without rights
//! on a resource cannot block it with a high number, these responses leave the fence unchanged:
//!
//! - 401, 403 and 405, whatever the handler has done before.
//! - 400, 413, 415 and 422, unless the handler has used its transaction. Extractors refuse
//!   unreadable requests with these statuses, and the layer cannot distinguish an extractor's
//!   response from the handler's own. It does know whether the handler may have seen data: whether
//!   it has used the connection of its [`FencedTx`](crate::FencedTx) or of its
//!   [`PendingWrite`] for a statement. If a handler derives such a response from data that it has
//!   read elsewhere, an older holder may still overwrite that data. Read on the transaction
//!   instead, or answer 409.
//!
//! Every other response counts as served: a 404 or a 409 states something about the resource, and
//! no older holder may change it afterwards. A redirect is a success and commits. If an extractor
//! redirects unauthenticated clients to a login page, put that extractor outside of the layer. A
//! client with rights can still block a resource with an arbitrary high number, unless the layer
//! accepts only [signed tokens](FenceLayer::verify_with). If all tokens come from this crate's
//! issuers, [`issued_by_this_database`](FenceLayer::issued_by_this_database) limits the damage.
//!
//! # Fenced reads
//!
//! A safe method (GET, HEAD, QUERY) with a token is a reusable write that writes nothing:
//!
//! 1. Its transaction admits the token. A stale token is refused. The read waits for a write that
//!    is in progress, and older writers that arrive later wait for the read.
//! 2. The handler runs once, with the time limit of a write. It may read on
//!    [`FencedTx`](crate::FencedTx) or elsewhere. Taking a second connection from the same pool can
//!    starve the pool.
//! 3. A response that does not reject the client (see above) commits durably: once it is answered,
//!    older tokens are stale, and the read has seen every older write. A response that rejects the
//!    client leaves the fence unchanged.
//!
//! A safe method without a token has no transaction, and the layer does not limit its time. An
//! `Option<FencedTx>` serves both.
//!
//! # Deployment
//!
//! - The layer protects what the handler writes on its [`FencedTx`](crate::FencedTx). Writes
//!   elsewhere (another connection, another service) are outside the transaction.
//! - While the handler runs, its request holds one connection of the pool. A handler that takes a
//!   second one from the same pool can starve it: size the pool for that, or use the transaction.
//! - axum's own `DefaultBodyLimit` (2 MB) still applies inside the handler's extractors.
//! - With `Router::layer`, the layer also sees requests that match no route. If the resource is
//!   taken from the path ([`PathParam`], [`ResourcePattern`](crate::ResourcePattern)), unsafe
//!   requests without a route are answered 404 before the fallback is reached. If it is taken from
//!   anything else, the fallback's 404 raises the fence: prefer `Router::route_layer`.
//! - With `Router::route_layer`, the layer also sees methods that the route does not support, and
//!   answers a stale token with 412 although the route would answer 405. With
//!   `MethodRouter::route_layer`, `get(show).put(set).route_layer(layer)`, it does not see them.
//! - Two names are two resources. If the handler parses the name (`Path<i64>`), the fence has to
//!   parse it as well, with [`FromPath`]. Otherwise `/items/07` bypasses the fence of `/items/7`.
//! - Each resource that is named with an admissible token keeps a row, even if the handler then
//!   fails, unless the response rejects the client. Authenticate, and check names that a client can
//!   invent, before the layer.
//! - A replay under an idempotency key does not reach the handler, so rights that the handler
//!   checks are not checked again. A key belongs to the principal that has sent it: make sure that
//!   [`Idempotency::principal`] identifies it.
//! - Stale writers are logged at WARN, in at most one line a second. Each line has the number of
//!   refusals that were `suppressed` since the previous line. Tokens that were already used are
//!   logged in the same way, in a line of their own. The metrics count every refusal.
//! - A 503 response promises nothing about older tokens: if the database is unreachable, the fence
//!   cannot be raised. The same holds for a 500 response for which the log reports "the fence could
//!   not be raised": the handler had broken its transaction, and either the database failed as well
//!   or (SQLite) the lock was still held.

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

use std::{fmt, sync::Arc, time::Duration};

use axum::response::Response;
use futures_util::future::BoxFuture;
use http::{HeaderName, request::Parts};
use tower_layer::Layer;

#[cfg(feature = "postgres")]
pub use self::pending::PgPendingWrite;
#[cfg(feature = "sqlite")]
pub use self::pending::SqlitePendingWrite;
use self::service::Config;
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
use crate::{
    fence::{Fence, FenceDatabase, TokenUse},
    header::FENCING_TOKEN,
};

/// Tower layer that puts a [`Fence`] in front of axum handlers.
///
/// See the [module](self) for its rules and an example.
pub struct FenceLayer<DB: FenceDatabase, R> {
    config: Config<DB, R>,
}

impl<DB: FenceDatabase, R: ResourceFrom> FenceLayer<DB, R> {
    /// Creates a layer for single-use tokens.
    ///
    /// `resource_from` finds the resource of a request: a
    /// [`ResourcePattern`](crate::ResourcePattern) or a [`PathParam`] from its path, a closure from
    /// its parts, or several of those. See [`ResourceFrom`].
    pub const fn new(fence: Fence<DB>, resource_from: R) -> Self {
        Self {
            config: Config {
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
            },
        }
    }

    /// Lets a token write any number of times, until a newer one is seen. Default: once.
    ///
    /// If a client or a proxy repeats a request, the write is then applied twice.
    #[must_use]
    pub const fn reusable(mut self) -> Self {
        self.config.token_use = TokenUse::Reusable;
        self
    }

    /// Leaves the admission to the handler, which takes a [`PendingWrite`] instead of a
    /// [`FencedTx`](crate::FencedTx). Default: the layer admits the token before the handler runs.
    ///
    /// If the handler validates first and refuses, the request costs the database nothing. A
    /// handler with a single statement needs no transaction around it. A token that this process
    /// already knows to be stale is refused before the handler runs.
    #[must_use]
    pub const fn deferred(mut self) -> Self {
        self.config.deferred = true;
        self
    }

    /// Refuses tokens whose epoch this database has never issued, with 403 `unknown-epoch`.
    /// Default: tokens of any issuer are accepted.
    ///
    /// Use it only if all tokens come from this crate's issuers over the same database
    /// (`RedisLeases`, `MemoryLeases` with this fence for their epochs). A token of another issuer
    /// is refused, unless it looks like a token of an issued epoch. The option bounds what a forged
    /// token can do: it supersedes no token of a later epoch.
    ///
    /// The layer caches the issued epochs. Only a token above them causes a query, at most once a
    /// second for each of 256 groups of resources; until then the request waits, without holding a
    /// connection. If the epoch is unknown, a second query, at most once a second for each
    /// resource, checks whether the token was announced: a grant that had to exceed the fence may
    /// be above all epochs.
    #[must_use]
    pub const fn issued_by_this_database(mut self) -> Self {
        self.config.known_epochs = true;
        self
    }

    /// Refuses tokens that the issuer has not [signed](crate::token_keys) with one of these keys,
    /// with 403 `forged-token`. Default: any integer is accepted.
    ///
    /// It takes [`TokenKeys`](crate::TokenKeys), or a [`Verification`] if unsigned tokens are still
    /// accepted.
    ///
    /// The header is verified before the resource is determined, before the body is read, before a
    /// stored response is looked up, and before the database is used. Each member needs the
    /// parameters `resource`, `key` and `mac`, as the issuer has written them. The client gets the
    /// same reason whatever is wrong; the log has the details.
    ///
    /// Without verification, a client can block a resource with an arbitrary high number in each of
    /// these ways. With keys, none of them works, whatever rights the client has:
    ///
    /// - a write with that number, which makes all lower tokens stale;
    /// - a failed write with that number (a 404 or a 409, for example), which also makes all lower
    ///   tokens stale;
    /// - a fenced read with that number, which needs no right to write;
    /// - a write behind a [deferred](Self::deferred) layer, or with a [reusable](Self::reusable)
    ///   token;
    /// - a write under an idempotency key;
    /// - a write to several resources, with a forged number for one of them;
    /// - a signed token of another resource or of another deployment, or a signed token whose
    ///   number the client has raised.
    ///
    /// Verification does not prevent replay: a client that sees a signed token can send it until it
    /// is stale, and so can its holder after the lease has ended. The fence handles those cases.
    ///
    /// A repetition under an idempotency key is verified as well. If the key of its token has been
    /// rotated out, the repetition is refused. Under a new lease, with the same idempotency key, it
    /// gets the stored response.
    ///
    /// ```
    /// # fn layer(
    /// #     fence: tower_fence::Fence<sqlx::Postgres>,
    /// # ) -> Result<(), Box<dyn std::error::Error>> {
    /// use axum::Router;
    /// use tower_fence::{FenceLayer, PathParam, TokenKeys, issuer::Issuer, lease::PostgresLeases};
    ///
    /// let keys = TokenKeys::from_env("TOKEN_KEY")?;
    /// let keys = keys.ok_or("TOKEN_KEY or TOKEN_KEY_FILE is needed")?;
    /// let issuer = Issuer::new(PostgresLeases::new(fence.clone())).sign_with(keys.clone());
    /// let layer = FenceLayer::new(fence, PathParam("sku")).verify_with(keys);
    /// # let _: (Router, _) = (issuer.router(), layer);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn verify_with(mut self, keys: impl Into<Verification>) -> Self {
        self.config.verification = Some(keys.into());
        self
    }

    /// Runs a function of the request and the connection in each fenced transaction, after the
    /// admission and before the handler.
    ///
    /// Use it for settings that the handler's statements depend on, such as a role or the tenant of
    /// row-level security.
    ///
    /// ```
    /// # fn layer(fence: tower_fence::Fence<sqlx::Postgres>) -> impl Clone {
    /// use tower_fence::{FenceLayer, PathParam};
    ///
    /// FenceLayer::new(fence, PathParam("sku")).on_begin(|parts, conn| {
    ///     Box::pin(async move {
    ///         // Set by authentication outside of this layer.
    ///         let tenant = parts.extensions.get::<String>().cloned().unwrap_or_default();
    ///         // `true`: the setting ends with the transaction.
    ///         sqlx::query("SELECT set_config('app.tenant', $1, true)")
    ///             .bind(tenant)
    ///             .execute(conn)
    ///             .await?;
    ///         Ok(())
    ///     })
    /// })
    /// # }
    /// ```
    ///
    /// If the function fails, the answer is that of a failed statement of the handler
    /// ([`DatabaseError`]): nothing is written, the token stays usable, and the fence is unchanged.
    /// The fence's [`hold_timeout`](crate::FenceBuilder::hold_timeout) bounds this function and the
    /// handler together. If it is exceeded, the answer is 503 `handler-timeout`.
    ///
    /// The function runs in each mode of the layer. Behind a [`deferred`](Self::deferred) layer it
    /// runs when the handler begins, and [`PendingWrite::write`] uses an open transaction instead
    /// of a single statement. It does not run if there is no transaction: for a read without a
    /// token, and for the replay of a stored response under an idempotency key.
    #[must_use]
    pub fn on_begin<F>(mut self, hook: F) -> Self
    where
        F: for<'a> Fn(&'a Parts, &'a mut DB::Connection) -> BoxFuture<'a, sqlx::Result<()>>
            + Send
            + Sync
            + 'static,
    {
        self.config.on_begin = Some(Arc::new(hook));
        self
    }

    /// Decides whether a response below 400 commits. Default: every such response does, unless it
    /// has the extension [`Rollback`].
    ///
    /// GraphQL, JSON-RPC and gRPC report errors with status 200. If the function returns `false`,
    /// the response counts as a failure: the handler's writes are rolled back, older tokens become
    /// stale, the token stays usable, and the response is not stored under an idempotency key. The
    /// client gets the response unchanged. A response with status 400 or above is rolled back
    /// whatever the function returns.
    ///
    /// The function sees the status, the headers, the extensions and the unread body. A panic in it
    /// counts as a panic of the handler.
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
        self.config.commit_if = Some(Arc::new(commits));
        self
    }

    /// Renders each [`Refusal`] in the application's own format. Default: problem+json.
    ///
    /// The function gets the refusal and the response with the problem document, and returns the
    /// response for the client. It is called for refusals of this layer, and for those that a
    /// handler returns, such as the error of [`PendingWrite::begin`]. At that point the transaction
    /// has ended and the refusal has been logged and counted, so the function affects only the
    /// rendering.
    ///
    /// ```
    /// # fn layer(fence: tower_fence::Fence<sqlx::Postgres>) -> impl Clone {
    /// use axum::{Json, response::IntoResponse};
    /// use serde_json::json;
    /// use tower_fence::{FenceLayer, PathParam};
    ///
    /// // As a GraphQL error.
    /// FenceLayer::new(fence, PathParam("sku")).map_refusal(|refusal, _problem| {
    ///     let code = refusal.problem_type().name();
    ///     let error = json!({ "message": refusal.to_string(), "extensions": { "code": code } });
    ///     Json(json!({ "data": null, "errors": [error] })).into_response()
    /// })
    /// # }
    /// ```
    #[must_use]
    pub fn map_refusal<F>(mut self, render: F) -> Self
    where
        F: Fn(&Refusal, Response) -> Response + Send + Sync + 'static,
    {
        self.config.map_refusal = Some(Arc::new(render));
        self
    }

    /// Sets the name of the header that carries the tokens. Default: [`FENCING_TOKEN`].
    #[must_use]
    pub fn header(mut self, name: HeaderName) -> Self {
        self.config.header = name;
        self
    }

    /// Sets the maximum length of a fenced request's body, in bytes. Default: 2 MiB.
    #[must_use]
    pub const fn body_limit_bytes(mut self, limit: usize) -> Self {
        self.config.body_limit_bytes = limit;
        self
    }

    /// Sets the timeout for reading a fenced request's body. Default: 10 s.
    #[must_use]
    pub const fn body_timeout(mut self, limit: Duration) -> Self {
        self.config.body_timeout = limit;
        self
    }

    /// Makes writes with an `Idempotency-Key` repeatable: a write is applied once, and every
    /// repetition gets the response of the first. Default: the header is ignored.
    ///
    /// Without this option, a single-use token keeps a repeated request from being applied twice.
    /// But a client that did not receive the first response only learns that its token is stale.
    /// See [`Idempotency`].
    ///
    /// Under a key, the handler leaves COMMIT to the layer, which stores the response with it:
    /// [`FencedTx::commit`](crate::FencedTx::commit) returns an error.
    #[must_use]
    pub fn idempotent(mut self, keys: Idempotency) -> Self {
        self.config.idempotency = Some(Arc::new(keys));
        self
    }
}

impl<S, DB: FenceDatabase, R: Clone> Layer<S> for FenceLayer<DB, R> {
    type Service = FenceService<S, DB, R>;

    fn layer(&self, inner: S) -> Self::Service {
        FenceService::new(inner, self.clone())
    }
}

impl<DB: FenceDatabase, R: Clone> Clone for FenceLayer<DB, R> {
    fn clone(&self) -> Self {
        Self {
            config: self.config.clone(),
        }
    }
}

impl<DB: FenceDatabase, R> fmt::Debug for FenceLayer<DB, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceLayer")
            .field("fence", &self.config.fence)
            .field("header", &self.config.header)
            .field("token_use", &self.config.token_use)
            .field("body_limit_bytes", &self.config.body_limit_bytes)
            .field("body_timeout", &self.config.body_timeout)
            .field("idempotency", &self.config.idempotency)
            .field("deferred", &self.config.deferred)
            .field("known_epochs", &self.config.known_epochs)
            .field("verification", &self.config.verification)
            .field("on_begin", &self.config.on_begin.is_some())
            .field("commit_if", &self.config.commit_if.is_some())
            .field("map_refusal", &self.config.map_refusal.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;

    fn shared<T: Send + Sync + Clone + 'static>() {}

    #[test]
    fn layer_service_and_refusal_can_be_shared() {
        shared::<FenceLayer<sqlx::Sqlite, PathParam>>();
        shared::<FenceService<axum::routing::Route, sqlx::Sqlite, PathParam>>();
        shared::<Refusal>();
        shared::<Fence<sqlx::Sqlite>>();
    }
}
