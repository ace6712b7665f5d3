//! Steps of the store in Postgres.

use std::sync::Arc;

use derive_where::derive_where;
use sqlx::postgres::PgConnectOptions;

use super::{functions::Functions, listener::Listener};
use crate::{
    calls::LeaseDatabase,
    lease::{
        Backend, Driver, Held, LeaseError, Page, Turns,
        backend::{Counters, Reply, Seen, Step, Waits},
    },
    token::Resource,
};

/// Leases in the database of a fence.
///
/// Use this store if you have Postgres and no Redis. Any number of processes can grant leases, and
/// any program can do so with the functions `tower_fence.acquire`, `tower_fence.renew` and
/// `tower_fence.release`. A lease is as durable as the database. The value is cheap to clone, and
/// its clones share the connection that receives notifications.
///
/// A grant makes all lower tokens stale in its own transaction, and waits for a write in progress.
/// Therefore a grant needs no announcement. A call takes a connection of the fence's pool, and its
/// timeouts are those of the fence
/// ([`FenceBuilder::pool_timeout`](crate::FenceBuilder::pool_timeout),
/// [`FenceBuilder::lock_timeout`](crate::FenceBuilder::lock_timeout),
/// [`FenceBuilder::answer_timeout`](crate::FenceBuilder::answer_timeout)). Requests in the queue
/// hold no connection. The process has one connection for all of them, in addition to the pool.
///
/// [`Fence::migrate`](crate::Fence::migrate) creates the tables and functions.
///
/// # Example
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// use axum::Router;
/// use tower_fence::{Fence, issuer, lease::PostgresLeases};
///
/// let fence = Fence::new(pool);
/// fence.migrate().await?;
/// let leases = PostgresLeases::new(fence);
///
/// let app: Router = Router::new().nest("/locks", issuer::router(leases));
/// # Ok(())
/// # }
/// ```
pub type PostgresLeases = Driver<PostgresBackend>;

/// Backend of [`PostgresLeases`].
#[derive_where(Debug)]
#[derive_where(skip_inner)]
pub struct PostgresBackend {
    functions: Functions,
    listen_with: Option<PgConnectOptions>,
}

impl Driver<PostgresBackend> {
    /// Creates a store in the database of this fence, without connecting yet.
    pub fn new(fence: impl LeaseDatabase) -> Self {
        Self::over(PostgresBackend {
            functions: Functions {
                database: Arc::new(fence),
            },
            listen_with: None,
        })
    }

    /// Sets the options of the connection on which this process receives notifications. Default:
    /// the options of the pool.
    ///
    /// Sessions cannot listen if the pool connects to a pooler in transaction mode, such as
    /// PgBouncer. In that case, pass the address of the Postgres server itself. If this option is
    /// not set, and the fence is set to
    /// [`transaction_pooling`](crate::FenceBuilder::transaction_pooling), waiting requests poll
    /// four times per second and are not served in order. Call this method before the store is
    /// cloned.
    ///
    /// ```no_run
    /// # fn example(fence: tower_fence::Fence<sqlx::Postgres>) -> Result<(), sqlx::Error> {
    /// # use tower_fence::lease::PostgresLeases;
    /// let leases = PostgresLeases::new(fence).listen_with("postgres://db-1:5432/shop".parse()?);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn listen_with(self, options: PgConnectOptions) -> Self {
        let functions = self.backend().functions.clone();
        self.with_backend(PostgresBackend {
            functions,
            listen_with: Some(options),
        })
    }
}

impl Backend for PostgresBackend {
    async fn step(
        &self,
        resource: &Resource,
        step: Step<'_>,
        _: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        let functions = &self.functions;
        match step {
            Step::Acquire(ask, waits) => {
                let (reply, others_wait) = functions.ask(resource, ask, waits).await?;
                // `others_wait` does not include a request that joined the queue during the grant,
                // but that request also needs the notification.
                if matches!(reply, Reply::Granted(_)) && (others_wait || *waits != Waits::No) {
                    self.notify_first(resource);
                }
                Ok(reply)
            }
            Step::Renew(renewal) => functions.renew(resource, renewal).await,
            Step::End(end) => functions.end(resource, end).await,
        }
    }

    async fn inspect(&self, resource: &Resource, _: Seen<'_>) -> Result<Option<Held>, LeaseError> {
        self.functions.inspect(resource).await
    }

    async fn page(
        &self,
        limit: usize,
        cursor: Option<&str>,
        _: Counters<'_>,
    ) -> Result<Page, LeaseError> {
        self.functions.list(limit, cursor).await
    }

    async fn listen(&self, turns: &Turns) -> Result<(), LeaseError> {
        let own = self.listen_with.clone();
        let database = &self.functions.database;
        let Some(options) = own.or_else(|| database.session_options()) else {
            // In transaction mode, a pooler may use another server connection for each transaction,
            // so sessions cannot listen.
            turns.ready(0);
            return std::future::pending().await;
        };
        let listener = Listener {
            options,
            functions: &self.functions,
            answer_timeout: database.answer_timeout(),
        };
        // An open session would keep the database from being dropped.
        tokio::select! {
            listened = listener.listen(turns) => listened,
            () = database.closed() => Ok(()),
        }
    }
}

impl PostgresBackend {
    /// Notifies the first request in the queue of the time at which this lease ends. A background
    /// task sends the notification, so that the holder does not wait for it.
    fn notify_first(&self, resource: &Resource) {
        let (functions, resource) = (self.functions.clone(), resource.clone());
        tokio::spawn(async move {
            // If the call fails, the next check of the queues detects the end of the lease.
            let _ = functions.call_first(&resource).await;
        });
    }
}
