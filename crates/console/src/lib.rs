//! A web page for operators that shows leases, fences and live events.
//!
//! - **Leases** shows the owner, the token, the remaining time and the number of waiters of each
//!   held lease. Operators can search for leases, and break a lease.
//! - **Fences** shows, for each resource, `max_token`, the time of the last use, and the floor of
//!   its partition. Operators can look up a resource, and reset its fence.
//! - **Live** shows the admissions, refusals, grants, waits, releases and losses of this process as
//!   they happen, and their number in the last five minutes. For a refused stale token, the page
//!   shows the presented token, the highest stale token, and the current holder, with the time of
//!   its grant. The events have the level TRACE. If the program enables a feature of `tracing` such
//!   as `release_max_level_info`, there are no events.
//!
//! The page is compiled into the crate, so you need no build step. The page loads nothing from
//! other servers. Its URLs are relative, so that you can nest it under any path.
//!
//! # It does not authenticate
//!
//! **Every client that can connect to the console can break leases and reset fences**, and a reset
//! makes stale tokens valid again. Put the authentication of your application in front of the
//! console, and admit only operators. Use cookies or a password, because a browser sends these
//! automatically, but not a bearer token. For example, with a password:
//!
//! ```
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! use std::sync::Arc;
//!
//! use axum::{
//!     Router,
//!     extract::{Request, State},
//!     http::{StatusCode, header::{AUTHORIZATION, WWW_AUTHENTICATE}},
//!     middleware::{Next, from_fn_with_state},
//!     response::{IntoResponse, Response},
//! };
//! use base64::{Engine, prelude::BASE64_STANDARD};
//! use sha2::{Digest, Sha256};
//! use subtle::ConstantTimeEq;
//! use tower_fence::{Fence, lease::MemoryLeases};
//! use tower_fence_console::Events;
//!
//! async fn operators_only(
//!     State(expected): State<Arc<str>>,
//!     request: Request,
//!     next: Next,
//! ) -> Response {
//!     let given = request.headers().get(AUTHORIZATION).map(|value| value.as_bytes());
//!     // Compares hashes, so that the time reveals neither the length nor a prefix of the secret.
//!     let given = Sha256::digest(given.unwrap_or_default());
//!     if given.as_slice().ct_eq(Sha256::digest(expected.as_bytes()).as_slice()).into() {
//!         return next.run(request).await;
//!     }
//!     let challenge = [(WWW_AUTHENTICATE, "Basic realm=\"operators\"")];
//!     (StatusCode::UNAUTHORIZED, challenge).into_response()
//! }
//!
//! # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
//! # let fence = Fence::new(options.connect("sqlite::memory:").await?);
//! # fence.migrate().await?;
//! # let leases = MemoryLeases::new(fence.clone());
//! # let password = "an example";
//! let expected = format!("Basic {}", BASE64_STANDARD.encode(format!("operator:{password}")));
//! let expected: Arc<str> = expected.into();
//! let events = Events::new(); // add `events.layer()` to the subscriber of the process
//! let console = tower_fence_console::router(fence, leases, events);
//! let console = console.layer(from_fn_with_state(expected, operators_only));
//! let app: Router = Router::new().nest_service("/ops/console", console);
//! # use tower::ServiceExt;
//! # let get = |path: &str| axum::http::Request::get(path);
//! # for path in ["/ops/console", "/ops/console/", "/ops/console/api/leases"] {
//! #     let request = get(path).body(axum::body::Body::empty())?;
//! #     assert_eq!(app.clone().oneshot(request).await?.status(), 401);
//! #     let secret = format!("Basic {}", BASE64_STANDARD.encode("operator:an example"));
//! #     let request = get(path).header("Authorization", secret).body(axum::body::Body::empty())?;
//! #     assert_eq!(app.clone().oneshot(request).await?.status(), 200);
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With `nest_service`, the path of the console works with and without a trailing slash. With
//! axum's `nest`, it works only without one.
//!
//! The console refuses requests that a page of another site sends through the browser of an
//! operator. The bodies of requests that change something are JSON, for which a browser sends a
//! preflight request first. If the browser sends `Sec-Fetch-Site`, the header must name the same
//! origin.
//!
//! # What it costs
//!
//! - The task that emits an event converts it from its `tracing` fields, and stores it in a ring
//!   buffer of fixed length. Without the layer of [`Events`], an event is not even formatted.
//!   Emitting an event does not wake readers. Each reader polls for new events five times a second.
//!   If a reader is too slow, it receives the number of events that it has missed.
//! - The feed contains only **the events of this process**: those of all its fences and issuers,
//!   since [`Events::new`]. If your service runs in several processes, each process shows its own
//!   events, and the page names the process. Leases and fences come from the stores, and are the
//!   same in all processes.
//! - At most 32 pages can follow the feed of a console at the same time. A page follows the feed
//!   only while it is visible. The process ends each request for the feed after 10 seconds, and the
//!   page then sends the next one. A graceful shutdown therefore waits for such a request for at
//!   most 10 seconds.
//! - While a page is visible, it lists 50 leases every 3 seconds, or once a second while leases
//!   change, and 50 fences every 5 seconds. The pause after a request is at least as long as the
//!   request took. The result of a search for leases is not refreshed automatically. For one page
//!   of the result, the process examines at most about 20,000 leases.

#[cfg(not(any(feature = "postgres", feature = "sqlite")))]
compile_error!("the console needs a database: `postgres` or `sqlite`");

mod event;
mod feed;
mod fences;
mod leases;
mod live;
mod page;
mod readers;
mod rejection;
mod request;

use std::sync::Arc;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    middleware::{from_fn, map_response},
    routing::{get, post},
};

use tower_fence::{Fence, FenceDatabase, lease::LeaseAdmin};

pub use self::feed::Events;
use self::readers::Readers;

/// Creates the router of a console with default settings. It
/// [does not authenticate](self#it-does-not-authenticate).
pub fn router<DB, L, S>(fence: Fence<DB>, leases: L, events: Events) -> Router<S>
where
    DB: FenceDatabase,
    L: LeaseAdmin,
    S: Clone + Send + Sync + 'static,
{
    Console::new(fence, leases, events).router()
}

/// A builder for the console of a fence and a lease store.
#[derive(Debug)]
pub struct Console<DB: FenceDatabase, L> {
    fence: Fence<DB>,
    leases: L,
    events: Events,
    process: String,
    readers: Arc<Readers>,
}

impl<DB: FenceDatabase, L: LeaseAdmin> Console<DB, L> {
    /// Creates a console with the default process name.
    pub fn new(fence: Fence<DB>, leases: L, events: Events) -> Self {
        Self {
            fence,
            leases,
            events,
            process: live::process_name(),
            readers: Arc::default(),
        }
    }

    /// Sets the name of this process on the page. Default: the name of the program, the process id,
    /// and the machine name from the environment variable `HOSTNAME` if it is set.
    #[must_use]
    pub fn process_name(mut self, name: impl Into<String>) -> Self {
        self.process = name.into();
        self
    }

    /// Returns the router. Nest it under a path of your service, behind your own authentication.
    pub fn router<S: Clone + Send + Sync + 'static>(self) -> Router<S> {
        let api = Router::new()
            .route("/leases", get(leases::list::<DB, L>))
            .route("/break", post(leases::break_lease::<DB, L>))
            .route("/fence", get(fences::look_up::<DB, L>))
            .route("/fences", get(fences::list::<DB, L>))
            .route("/floors", get(fences::floors::<DB, L>))
            .route("/reset", post(fences::reset::<DB, L>))
            .route("/events", get(live::events::<DB, L>))
            .route_layer(from_fn(request::refuse_other_sites))
            .layer(DefaultBodyLimit::max(rejection::BODY_LIMIT_BYTES));
        Router::new()
            .route("/", get(page::index))
            .route("/{file}", get(page::file))
            .nest("/api", api)
            .layer(map_response(page::protect))
            .with_state(Arc::new(self))
    }
}
