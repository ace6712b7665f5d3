//! Steps of the store in Redis.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use derive_where::derive_where;

use super::{connection::Connection, scripts::Scripts};
use crate::{
    epochs::{Epoch, partition_of},
    lease::{
        Backend, Driver, Held, LeaseError, Page, Turns,
        backend::{BlankCounter, Counters, Reply, Seen, Step},
    },
    token::Resource,
};

/// Leases in a Redis server.
///
/// The store reconnects automatically. The server must report its `master_replid` (`INFO
/// replication`) inside scripts. The value is cheap to clone, and its clones share their
/// connections.
///
/// # Example
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// use axum::Router;
/// use tower_fence::{Fence, issuer, lease::RedisLeases};
///
/// let fence = Fence::new(pool);
/// let leases = RedisLeases::connect("redis://localhost", fence.clone()).await?;
/// // Or, if the service may start before its Redis:
/// let leases = RedisLeases::builder(fence.clone())
///     .key_prefix("shop")
///     .connect_lazy("redis://localhost")?;
///
/// let app: Router = Router::new().nest("/locks", issuer::router(leases.announced_to(fence)));
/// # Ok(())
/// # }
/// ```
pub type RedisLeases = Driver<RedisBackend>;

/// Backend of [`RedisLeases`].
#[derive_where(Debug)]
#[derive_where(skip_inner)]
pub struct RedisBackend {
    pub(super) scripts: Scripts,
    /// The last part of the names of this process's own channels.
    pub(super) issuer: i64,
    /// The listening connection, while it is open.
    pub(super) subscriptions: Mutex<Option<Arc<Subscriptions>>>,
}

/// Listening connection, with the partitions to which it is subscribed.
pub(super) struct Subscriptions {
    pub(super) subscriber: Connection,
    pub(super) partitions: Mutex<BTreeSet<u8>>,
}

impl RedisBackend {
    pub(super) fn new(scripts: Scripts) -> Self {
        Self {
            scripts,
            issuer: rand::random_range(1..=i64::MAX),
            subscriptions: Mutex::default(),
        }
    }
}

impl Backend for RedisBackend {
    async fn step(
        &self,
        resource: &Resource,
        step: Step<'_>,
        seen: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        match step {
            Step::Acquire(ask, waits) => self.scripts.acquire(resource, ask, waits, seen).await,
            Step::Renew(renewal) => self.scripts.renew(resource, renewal, seen).await,
            Step::End(end) => self.scripts.end(resource, end, seen).await,
        }
    }

    async fn begin_epoch(
        &self,
        resource: &Resource,
        counter: &BlankCounter,
        epoch: Epoch,
        seen: Seen<'_>,
    ) -> Result<bool, LeaseError> {
        let scripts = &self.scripts;
        scripts.begin_epoch(resource, counter, epoch, seen).await
    }

    async fn inspect(
        &self,
        resource: &Resource,
        seen: Seen<'_>,
    ) -> Result<Option<Held>, LeaseError> {
        self.scripts.inspect(resource, seen).await
    }

    async fn page(
        &self,
        limit: usize,
        cursor: Option<&str>,
        counters: Counters<'_>,
    ) -> Result<Page, LeaseError> {
        self.scripts.list(limit, cursor, counters).await
    }

    async fn listen(&self, turns: &Turns) -> Result<(), LeaseError> {
        self.receive(turns).await
    }

    fn key_prefix(&self) -> &str {
        self.scripts.key_prefix()
    }

    async fn follow(&self, resource: &Resource) -> Result<(), LeaseError> {
        self.subscribe(partition_of(resource)).await
    }
}
