//! The resource side, as a tower layer: [`FenceLayer`] refuses stale writers before the handler
//! runs, and commits the handler's writes together with the check.
//!
//! 1. An unsafe method needs one token for its resource, or one for each of its resources. A safe
//!    one (GET, HEAD, QUERY) may carry them: then everyone older is dead once it is answered (a *fenced
//!    read*, below). OPTIONS and TRACE pass, whatever they bring, and so does a preflight.
//!    Where the layer [verifies](FenceLayer::verify_with), a token that the issuer has not signed is refused before anything else.
//! 2. The body is read first, bounded in size and time, so that a slow client holds neither a
//!    connection nor a row lock. A request that is refused before that is answered at once, and the rest of its body is
//!    read beside the answer, as far as four times the limit: a client that writes all of its request before it reads would
//!    not see the answer otherwise.
//! 3. The token is admitted in a transaction (of several tokens all, or none), which the handler gets from the extractor
//!    [`FencedTx`](crate::FencedTx). A handler that does not ask for it is protected all the same.
//! 4. A status below 400 commits, unless the handler [demands a rollback](Rollback) or the layer
//!    [decides otherwise](FenceLayer::commit_if). Anything else, a panic and a timeout too, rolls back: the token
//!    stays usable, and everyone older is dead from then on. But who is turned away without being
//!    served moves nothing (below).
//! 5. Only then does the response leave. A success is never answered without a confirmed COMMIT. A
//!    handler that takes too long is answered within half a second of its limit, while its
//!    transaction is ended.
//! 6. Behind a [`deferred`](FenceLayer::deferred) layer the handler gets a [`PendingWrite`], and admits
//!    when it is ready: with a transaction, or together with a single statement.
//! 7. Where the layer is [`idempotent`](FenceLayer::idempotent) and the request has a key, the key
//!    is looked up first, in the same transaction: a write that was made before is answered as it
//!    was then. The response of a new one is stored in the COMMIT of the write.
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
//! # Who is turned away
//!
//! A token is a number, and the highest one outranks all others. So that nobody closes a resource
//! without having rights on it, these answers leave the fence where it was:
//!
//! - 401, 403 and 405, whatever the handler has done before.
//! - 400, 413, 415 and 422, unless the handler has used its transaction. That is how extractors refuse
//!   what nobody can read, and the layer cannot tell their answers from a handler's own. It can
//!   tell whether a handler may have seen anything: where it has had the connection of its
//!   [`FencedTx`](crate::FencedTx), or of its [`PendingWrite`], for a statement. A handler that gives
//!   such an answer out of what it has read elsewhere tells its client something that an older holder
//!   may still overwrite; read on the transaction, or answer 409.
//!
//! Everything else counts as served: a 404 or a 409 says something about the resource, which no older
//! holder may change any more. A redirect is a success and commits: where an extractor sends strangers
//! to a page to log in, put it outside of the layer. A client with rights can close a resource by a
//! number out of the blue all the same, unless the layer takes [signed tokens](FenceLayer::verify_with) alone; where
//! the tokens are this crate's own, [`issued_by_this_database`](FenceLayer::issued_by_this_database) bounds that.
//!
//! # Fenced reads
//!
//! A safe method (GET, HEAD, QUERY) with a token is a reusable write that writes nothing:
//!
//! 1. Its transaction admits the token. A stale token is refused, a write under way is waited for, and from
//!    then on older writers wait for the read.
//! 2. The handler runs once, with the time limit of a write. It may read on [`FencedTx`](crate::FencedTx), or
//!    elsewhere. A second connection of the same pool can starve the pool.
//! 3. An answer that is not a refusal of the client commits, durably: once it is answered, older tokens
//!    are stale, and no older write was missed. A refused client (see above) moves nothing.
//!
//! A safe method without a token has no transaction, and the layer does not time it. An
//! `Option<FencedTx>` serves both.
//!
//! # Deployment
//!
//! - The layer protects what the handler writes on its [`FencedTx`](crate::FencedTx). What it
//!   writes elsewhere (another connection, another service) is outside the transaction.
//! - While the handler runs, its request holds one connection of the pool. A handler that takes a
//!   second one from the same pool can starve it: size the pool for that, or use the transaction.
//! - axum's own `DefaultBodyLimit` (2 MB) still applies inside the handler's extractors.
//! - With `Router::layer` the layer also sees requests that match no route: unsafe ones are
//!   answered 404 before the fallback is reached, where the resource is named by the path ([`PathParam`], [`ResourcePattern`](crate::ResourcePattern)). Where it is
//!   something else, the fallback's 404 raises the fence: prefer `Router::route_layer`.
//! - With `Router::route_layer` it sees methods that a route does not have, and refuses a stale token (412) where the route
//!   would answer 405. With `MethodRouter::route_layer`, `get(show).put(set).route_layer(layer)`, it does not.
//! - Two names are two resources. Where the handler parses the name (`Path<i64>`), the fence has to
//!   parse it as well, with [`FromPath`]. Otherwise `/items/07` passes by the fence of `/items/7`.
//! - Each resource that was named with an admissible token keeps a row, also where the handler then
//!   failed, unless it turned the client away: put authentication, and checks of names that anybody may
//!   invent, in front.
//! - A replay under an idempotency key does not reach the handler: rights that are checked in there
//!   are not checked again. A key belongs to the client that has sent it, which [`Idempotency::principal`]
//!   has to be able to tell.
//! - Stale writers are logged at WARN, at most one line a second, with the number of those
//!   `suppressed` since the line before; so are, with a line of their own, tokens that were used already. The metrics count
//!   each.
//! - 503 answers promise nothing about older tokens: where the database is out of reach, the
//!   fence cannot be raised. Nor does a 500 beside which the log says so: a transaction that the
//!   handler had broken, where the database failed as well or (SQLite) the lock was still held.

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

/// Puts a [`Fence`] in front of axum handlers. See the [module](self) for what it does.
pub struct FenceLayer<DB: FenceDatabase, R> {
    config: Config<DB, R>,
}

impl<DB: FenceDatabase, R: ResourceFrom> FenceLayer<DB, R> {
    /// A layer for single-use tokens. `resource_from` finds the resource of a request: a
    /// [`ResourcePattern`](crate::ResourcePattern) or a [`PathParam`] from its path, a closure from its parts, or several of
    /// those; see [`ResourceFrom`].
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

    /// Lets a token write as often as its holder likes, until a newer one is seen. Default: once.
    ///
    /// A request that is repeated, by a client or by a proxy, then applies twice.
    #[must_use]
    pub const fn reusable(mut self) -> Self {
        self.config.token_use = TokenUse::Reusable;
        self
    }

    /// Leaves the admission to the handler, which takes a [`PendingWrite`] instead of a
    /// [`FencedTx`](crate::FencedTx). Default: the layer admits before the handler runs.
    ///
    /// A handler that validates first costs the database nothing when it refuses, and a handler of
    /// a single statement needs no transaction around it. What this process knows to be stale is refused
    /// before the handler, all the same.
    #[must_use]
    pub const fn deferred(mut self) -> Self {
        self.config.deferred = true;
        self
    }

    /// Refuses tokens whose epoch this database has never handed out, with 403 `unknown-epoch`.
    /// Default: any integer counts, whichever issuer made it.
    ///
    /// For tokens of this crate's issuers over the same database (`RedisLeases`, `MemoryLeases`
    /// with this fence for their epochs), and no others: what another issuer has made is refused, unless it looks like
    /// one of an epoch that was handed out.
    /// It bounds what a forged token can do: it outranks no later epoch.
    ///
    /// The epochs are remembered. Only a token above them makes the layer look, at most once a
    /// second for each of 256 groups of resources; it waits for so long, without a connection. Then
    /// it looks, at most once a second for each resource, whether that token was announced: a grant
    /// that outranked the fence may be above all epochs.
    #[must_use]
    pub const fn issued_by_this_database(mut self) -> Self {
        self.config.known_epochs = true;
        self
    }

    /// Refuses tokens that the issuer has not [signed](crate::token_keys) with one of these keys, with 403
    /// `forged-token`. Default: any integer counts. Takes [`TokenKeys`](crate::TokenKeys), or a [`Verification`] where unsigned
    /// tokens are still accepted.
    ///
    /// The field is verified before anything else is done with it: before the resource is looked up, before the body, before a stored
    /// answer, and before anything is asked of the database. Each member needs `resource`, `key` and `mac`, as the issuer has
    /// written them. The client is told one reason, whatever is wrong; the log has more.
    ///
    /// These are the ways for a number out of the blue to close a resource, where nothing is verified. With keys none of
    /// them is left, whoever may write or read there:
    ///
    /// - a write with it, which leaves it as the highest token that is dead;
    /// - a write with it that fails, a 404 or 409 say, which makes everyone older dead all the same;
    /// - a fenced read with it, for which no right to write is needed;
    /// - a write behind a [deferred](Self::deferred) layer, or under a [reusable](Self::reusable) token;
    /// - a write under an idempotency key;
    /// - a write to several resources, one of them under a number of one's own;
    /// - a signed token of another resource, of another deployment, or of one's own with a higher number.
    ///
    /// What stays: whoever sees a signed token can send it, until it is stale; so may its holder, after the lease has
    /// ended. That is what the fence is for.
    ///
    /// A repetition under an idempotency key is verified as well. Where the key of its token has been rotated out, it is
    /// refused; under a new lease, and the same idempotency key, it gets the stored answer.
    ///
    /// ```
    /// # fn layer(fence: tower_fence::Fence<sqlx::Postgres>) -> Result<(), Box<dyn std::error::Error>> {
    /// use axum::Router;
    /// use tower_fence::{FenceLayer, PathParam, TokenKeys, issuer::Issuer, lease::PostgresLeases};
    ///
    /// let keys = TokenKeys::from_env("TOKEN_KEY")?.ok_or("TOKEN_KEY or TOKEN_KEY_FILE is needed")?;
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
    /// admission and before the handler has it: for what the handler's statements depend on, such as
    /// the tenant of row-level security, or a role.
    ///
    /// ```
    /// # fn layer(fence: tower_fence::Fence<sqlx::Postgres>) -> impl Clone {
    /// use tower_fence::{FenceLayer, PathParam};
    ///
    /// FenceLayer::new(fence, PathParam("sku")).on_begin(|parts, conn| {
    ///     Box::pin(async move {
    ///         // What authentication outside of this layer has found out.
    ///         let tenant = parts.extensions.get::<String>().cloned().unwrap_or_default();
    ///         // Until the end of the transaction, and no longer.
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
    /// Its failure is answered as that of a handler's statement ([`DatabaseError`]); nothing is
    /// written, the token stays usable, and the fence stays where it was. The fence's
    /// [`hold_timeout`](crate::FenceBuilder::hold_timeout) bounds this hook and the handler together. Over it, the answer is 503 `handler-timeout`.
    ///
    /// It runs in each mode of the layer. Behind a [`deferred`](Self::deferred) one it runs when the
    /// handler begins, and [`PendingWrite::write`] takes an open transaction instead of a single
    /// statement. It does not run if there is no transaction: for a read without a token, and for the
    /// answer to a repetition under an idempotency key.
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

    /// Decides whether a response below 400 commits. Default: each of them does, unless it has the extension
    /// [`Rollback`].
    ///
    /// GraphQL, JSON-RPC and gRPC report errors with status 200. If the function returns `false`, the response
    /// counts as a failure: the handler's writes are rolled back, older tokens become stale, the token stays usable, and
    /// under an idempotency key the response is not stored. The client gets the response as it is. A status of 400 and
    /// above is rolled back whatever the function returns.
    ///
    /// The function sees the status, the headers and the extensions, and a body that nobody has read. A panic in it
    /// counts as one of the handler.
    ///
    /// ```
    /// # fn layer(fence: tower_fence::Fence<sqlx::Postgres>) -> impl Clone {
    /// use tower_fence::{FenceLayer, PathParam};
    ///
    /// // A unary call of gRPC that fails has its status in the headers.
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
    /// The function gets the reason and the response with the problem document, and returns the response that the
    /// client gets. It is called for refusals of this layer, and for those that a handler returns, such as the error
    /// of [`PendingWrite::begin`]. By then the transaction has ended and the refusal is logged and counted, so the function
    /// changes nothing but the rendering.
    ///
    /// ```
    /// # fn layer(fence: tower_fence::Fence<sqlx::Postgres>) -> impl Clone {
    /// use axum::{Json, response::IntoResponse};
    /// use serde_json::json;
    /// use tower_fence::{FenceLayer, PathParam};
    ///
    /// // As an error of GraphQL.
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

    /// The name of the header. Default: [`FENCING_TOKEN`].
    #[must_use]
    pub fn header(mut self, name: HeaderName) -> Self {
        self.config.header = name;
        self
    }

    /// The greatest length of a fenced request's body, in bytes. Default: 2 MiB.
    #[must_use]
    pub const fn body_limit_bytes(mut self, limit: usize) -> Self {
        self.config.body_limit_bytes = limit;
        self
    }

    /// How long to wait for a fenced request's body. Default: 10 s.
    #[must_use]
    pub const fn body_timeout(mut self, limit: Duration) -> Self {
        self.config.body_timeout = limit;
        self
    }

    /// Lets a write be repeated under an `Idempotency-Key` until it is answered: it happens once,
    /// and is answered the same way every time. Default: the header is ignored.
    ///
    /// Without it a single-use token keeps a repeated request from applying twice, but the client
    /// whose answer was lost learns only that its token is stale. See [`Idempotency`].
    ///
    /// A handler under a key leaves COMMIT to the layer, which stores the response with it:
    /// [`FencedTx::commit`](crate::FencedTx::commit) is refused.
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
