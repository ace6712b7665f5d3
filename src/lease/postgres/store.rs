//! The store in Postgres: its steps.

use std::{fmt, sync::Arc};

use sqlx::postgres::PgConnectOptions;

use super::{functions::Functions, listener::Listener};
use crate::{
    calls::LeaseDatabase,
    lease::{
        Backend, Driver, Held, LeaseError, ListError, Page, Turns,
        backend::{Counters, End, Reply, Seen, Step, Waits},
    },
    token::Resource,
};

/// Leases in the database of a fence, and on its own rows. Cheap to clone; clones share a connection.
///
/// For teams that have Postgres and no Redis: as many processes as there are may grant leases, and any program
/// by the functions `tower_fence.acquire`, `tower_fence.renew` and `tower_fence.release`. A lease survives what the database
/// survives.
///
/// A grant makes everyone older stale in its own transaction, and waits for a write in flight: nothing has to be
/// announced, since that is what each grant does. It takes a connection of the fence's pool for
/// the time of a call, and waits no longer than the fence does ([`FenceBuilder::pool_timeout`](crate::FenceBuilder::pool_timeout), [`FenceBuilder::lock_timeout`](crate::FenceBuilder::lock_timeout),
/// [`FenceBuilder::answer_timeout`](crate::FenceBuilder::answer_timeout)). Requests in the queue have no connection; the process has one more for all of
/// them, beside the pool.
///
/// [`Fence::migrate`](crate::Fence::migrate) makes the tables and functions.
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

/// The backend of [`PostgresLeases`].
pub struct PostgresBackend {
    functions: Functions,
    listen_with: Option<PgConnectOptions>,
}

impl Driver<PostgresBackend> {
    /// Leases in the database of this fence. Nothing is sent yet.
    pub fn new(fence: impl LeaseDatabase) -> Self {
        Self::over(PostgresBackend {
            functions: Functions {
                database: Arc::new(fence),
            },
            listen_with: None,
        })
    }

    /// How the one connection is made on which this process hears of its turns. Default: as the pool's are.
    /// To be set before the store is cloned.
    ///
    /// For a pool that leads to a pooler in transaction mode, such as PgBouncer's, where no session can listen: name
    /// the server itself here. Without that, where the fence says
    /// [`transaction_pooling`](crate::FenceBuilder::transaction_pooling), requests that wait ask again four times a second, and
    /// are not served in their order.
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
                // A request that joined behind it while it was granted is not among the others yet, and counts on it.
                if matches!(reply, Reply::Granted(_)) && (others_wait || waits != Waits::No) {
                    self.tell_the_first(resource);
                }
                Ok(reply)
            }
            Step::Renew(renewal) => functions.renew(resource, renewal).await,
            Step::End(End::Release(lease)) => functions.end(resource, lease).await,
            Step::End(End::Break(seen)) => functions.break_lease(resource, *seen).await,
            Step::End(End::Abandon { lease, ticket }) => {
                functions.abandon(resource, lease, *ticket).await
            }
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
    ) -> Result<Page, ListError> {
        self.functions.list(limit, cursor).await
    }

    async fn listen(&self, turns: &Turns) -> Result<(), LeaseError> {
        let own = self.listen_with.clone();
        let database = &self.functions.database;
        let Some(options) = own.or_else(|| database.session_options()) else {
            // A pooler that gives each transaction a server of its own lets no session listen.
            turns.ready("");
            return std::future::pending().await;
        };
        let listener = Listener {
            options,
            functions: &self.functions,
            within: database.answer_wait(),
        };
        listener.listen(turns).await
    }
}

impl PostgresBackend {
    /// Tells the first in the queue, who has it when this lease ends, when that is. In a task: the holder need not
    /// wait for it.
    fn tell_the_first(&self, resource: &Resource) {
        let (functions, resource) = (self.functions.clone(), resource.clone());
        tokio::spawn(async move {
            // Where it fails, the next look of its process finds the end.
            let _ = functions.call_first(&resource).await;
        });
    }
}

impl fmt::Debug for PostgresBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresBackend").finish_non_exhaustive()
    }
}
