//! A page for operators: which leases are held, what the fences have seen, and what happens, live.
//!
//! - **Leases**: who holds what, with which token, for how long still, and how many wait. Search; end one by force.
//! - **Fences**: `max_token` of each resource, when it was used last, the floors; look one up; take one back.
//! - **Live**: admissions, refusals, grants, waits, hand-overs and losses of this process as they happen, and how many
//!   there were in the last minutes. A refusal explains itself: which token was presented, up to which one all are
//!   dead, who holds the lease now, and since when.
//!
//! It is one page, served from the crate: nothing is built, and nothing is loaded from elsewhere. Its URLs are
//! relative, so that it can be nested anywhere.
//!
//! # It does not authenticate
//!
//! **Whoever reaches the console ends leases and takes fences back**, which lets a dead token write again. Put the
//! application's own authentication in front of it, of operators alone. A browser can send a cookie or a password by
//! itself, a bearer token it cannot. With a password, say:
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
//! async fn operators_only(State(expected): State<Arc<str>>, request: Request, next: Next) -> Response {
//!     let given = request.headers().get(AUTHORIZATION).map(|value| value.as_bytes());
//!     // Of hashes, so that the time it takes tells neither how long the secret is nor how it begins.
//!     let given = Sha256::digest(given.unwrap_or_default());
//!     if given.as_slice().ct_eq(Sha256::digest(expected.as_bytes()).as_slice()).into() {
//!         return next.run(request).await;
//!     }
//!     (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Basic realm=\"operators\"")]).into_response()
//! }
//!
//! # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
//! # let fence = Fence::new(options.connect("sqlite::memory:").await?);
//! # fence.migrate().await?;
//! # let leases = MemoryLeases::new(fence.clone());
//! # let password = "an example";
//! let expected = format!("Basic {}", BASE64_STANDARD.encode(format!("operator:{password}")));
//! let expected: Arc<str> = expected.into();
//! let events = Events::new(); // its layer belongs to the subscriber of the process
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
//! `nest_service` answers with and without a slash at the end; axum's `nest` without one only.
//!
//! Requests that a page of another site has a browser send are refused: what changes something is JSON, which needs that
//! browser to ask here first, and `Sec-Fetch-Site` has to say that the page is of this origin.
//!
//! # What it costs
//!
//! - From the first console of a process on, each event takes its place in a ring of fixed length, some 100 ns. Without
//!   one, or without the feature, nothing. No reader slows a request: readers come by five times a second and take what
//!   is new; whoever is too slow hears how many events it has missed.
//! - The feed is **that of the process**, of all its fences and issuers, from the start of its first console on. Where there are several
//!   processes, each shows what it has seen itself, and the page says which one that is. Leases and fences are those
//!   of the stores, whichever process shows them.
//! - Up to 32 pages follow the feed of a console at a time. A page that is not looked at does not; and each request for the
//!   feed ends after 10 seconds, to be followed by the next one, so that a stop with grace need not wait for longer.
//! - While a page is looked at it lists fifty leases and fifty fences every few seconds. A search among leases looks
//!   through up to 20,000 of them at a time.

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
use self::{live::Process, readers::Readers};

/// The console of a fence and a lease store. See [the module](self), above all
/// [what it does not do](self#it-does-not-authenticate).
pub fn router<DB, L, S>(fence: Fence<DB>, leases: L, events: Events) -> Router<S>
where
    DB: FenceDatabase,
    L: LeaseAdmin,
    S: Clone + Send + Sync + 'static,
{
    Console::new(fence, leases, events).router()
}

/// Settings of the console.
#[derive(Debug)]
pub struct Console<DB: FenceDatabase, L> {
    fence: Fence<DB>,
    leases: L,
    events: Events,
    process: Process,
    readers: Arc<Readers>,
}

impl<DB: FenceDatabase, L: LeaseAdmin> Console<DB, L> {
    /// A console with the default name.
    pub fn new(fence: Fence<DB>, leases: L, events: Events) -> Self {
        Self {
            fence,
            leases,
            events,
            process: Process::of_this(),
            readers: Arc::default(),
        }
    }

    /// How the page calls this process. Default: the name of its program, that of the machine where the environment has
    /// it as `HOSTNAME`, and its process id.
    #[must_use]
    pub fn process_name(mut self, name: impl Into<String>) -> Self {
        self.process.name = name.into();
        self
    }

    /// The router, to be nested where the console shall live, behind the application's own authentication. Events are
    /// kept from now on.
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
            .layer(DefaultBodyLimit::max(request::BODY_LIMIT_BYTES));
        Router::new()
            .route("/", get(page::index))
            .route("/{file}", get(page::file))
            .nest("/api", api)
            .layer(map_response(page::protect))
            .with_state(Arc::new(self))
    }
}
