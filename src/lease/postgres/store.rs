//! The store in Postgres: one loop that asks, waits for its turn, and asks again.

use std::{fmt, sync::Arc, time::Duration};

use sqlx::postgres::PgConnectOptions;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::{
    functions::{Asked, Functions, Renewed, Request},
    listener::Listener,
    pending::PendingAcquire,
    waiters::{Waiters, Wake},
};
use crate::{
    calls::LeaseDatabase,
    lease::{
        Acquire, Held, Lease, LeaseError, LeaseId, Leases, ListError, Operate, Page, Renew,
        WaiterLimits, time::after,
    },
    token::{Resource, Token},
};

/// Leases in the database of a fence, and on its own rows. Cheap to clone; clones share a connection.
///
/// For teams that have Postgres and no Redis: as many processes as there are may grant leases, and any program
/// by the functions `tower_fence.acquire`, `tower_fence.renew` and `tower_fence.release`. A lease survives what the database
/// survives.
///
/// A grant makes everyone older dead in its own transaction, and waits for a write in flight: there is no
/// `announced_to`, since that is what each grant does. It takes a connection of the fence's pool for
/// the time of a call, and waits no longer than the fence does ([`FenceBuilder::pool_timeout`](crate::FenceBuilder::pool_timeout), [`FenceBuilder::lock_timeout`](crate::FenceBuilder::lock_timeout),
/// [`FenceBuilder::answer_timeout`](crate::FenceBuilder::answer_timeout)). Those who wait in line have no connection; the process has one more for all of
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
#[derive(Clone)]
pub struct PostgresLeases {
    functions: Functions,
    limits: WaiterLimits,
    listen_with: Option<PgConnectOptions>,
    waiters: Arc<Waiters>,
    listener: Listener,
}

impl PostgresLeases {
    /// Leases in the database of this fence. Nothing is sent yet.
    #[must_use]
    pub fn new(fence: impl LeaseDatabase) -> Self {
        let database = Arc::new(fence);
        Self::build(Functions { database }, WaiterLimits::default(), None)
    }

    fn build(
        functions: Functions,
        limits: WaiterLimits,
        listen_with: Option<PgConnectOptions>,
    ) -> Self {
        let waiters = Waiters::new(limits);
        Self {
            listener: Listener::new(functions.clone(), Arc::clone(&waiters), listen_with.clone()),
            functions,
            limits,
            listen_with,
            waiters,
        }
    }

    /// How many may wait for one resource, over all processes. Default: 1,000. Above that a request to wait is
    /// answered [`LeaseError::TooManyWaiters`]. To be set before the store is cloned.
    #[must_use]
    pub fn max_waiters_per_resource(self, limit: usize) -> Self {
        let in_all = self.limits.in_all;
        let limits = WaiterLimits {
            per_resource: limit,
            in_all,
        };
        Self::build(self.functions, limits, self.listen_with)
    }

    /// How many may wait at this process, for any resource. Default: 10,000. Above that a request to wait is
    /// answered [`LeaseError::TooManyWaiters`]. To be set before the store is cloned.
    #[must_use]
    pub fn max_waiters(self, limit: usize) -> Self {
        let per_resource = self.limits.per_resource;
        let limits = WaiterLimits {
            per_resource,
            in_all: limit,
        };
        Self::build(self.functions, limits, self.listen_with)
    }

    /// How the one connection is made on which this process hears of its turns. Default: as the pool's are.
    /// To be set before the store is cloned.
    ///
    /// For a pool that leads to a pooler in transaction mode, such as PgBouncer's, where no session can listen: name
    /// the server itself here. Without that, where the fence says
    /// [`transaction_pooling`](crate::FenceBuilder::transaction_pooling), those who wait ask again four times a second, and
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
        Self::build(self.functions, self.limits, Some(options))
    }
}

/// The pause before the next attempt where a process cannot listen.
const ASK_AGAIN: Duration = Duration::from_millis(250);
/// How long a request waits for its process to listen before it asks again by itself.
const LISTEN_WAIT: Duration = Duration::from_secs(1);
/// The first pause where another transaction was in the way; each one after it is twice as long, up to
/// [`ASK_AGAIN`].
const SHORT_PAUSE: Duration = Duration::from_millis(2);
/// The shortest time after which the first in line looks again at a resource that is closed.
const SHORTEST_LOOK: Duration = Duration::from_millis(5);
/// How often a renewal tries to lock the lease.
const RENEWALS: u32 = 8;

impl Leases for PostgresLeases {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let deadline = after(request.wait);
        let mut pending = PendingAcquire::new(&self.functions, Request::new(resource, &request));
        let max_waiters = self.waiters.max_per_resource();
        // The first time without a wait: most locks are free, unless others wait here already.
        let mut listener = None;
        if !request.wait.is_zero()
            && self.waiters.have_line(resource)
            && pending.join(&self.waiters)
        {
            listener = self.listen(deadline).await?;
        }
        let mut pause = SHORT_PAUSE;
        loop {
            // The end of the wait that is known, for the first in line.
            let mut look_at = None;
            match pending.ask(listener, max_waiters).await {
                Ok(Asked::Granted { token, others_wait }) => {
                    // Who joined behind it while it was granted is not among the others yet, and counts on it.
                    let was_in_line = pending.seat.is_some();
                    pending.finish();
                    if others_wait || was_in_line {
                        self.tell_the_first(resource);
                    }
                    return Ok(Lease::granted(
                        resource,
                        &request.lease_id,
                        token,
                        request.ttl,
                    ));
                }
                Ok(Asked::Exhausted(max_token)) => {
                    pending.finish();
                    return Err(LeaseError::Exhausted {
                        resource: resource.clone(),
                        max_token,
                    });
                }
                Ok(Asked::Held { closed }) if Instant::now() >= deadline => {
                    pending.finish();
                    return Err(LeaseError::Held {
                        resource: resource.clone(),
                        retry_after: closed,
                    });
                }
                Ok(Asked::Held { .. }) if pending.join(&self.waiters) => {
                    listener = self.listen(deadline).await?;
                    if listener.is_none() {
                        sleep_until(after(ASK_AGAIN).min(deadline)).await;
                    }
                    continue;
                }
                Ok(Asked::Held { .. } | Asked::Full) => {
                    // Nothing of it is in the database.
                    pending.finish();
                    return Err(LeaseError::too_many_waiters(resource));
                }
                Ok(Asked::Again) => {
                    sleep_until(after(pause).min(deadline)).await;
                    pause = (2 * pause).min(ASK_AGAIN);
                    if Instant::now() >= deadline {
                        listener = None;
                    }
                    continue;
                }
                Ok(Asked::First { closed }) => look_at = Some(after(closed.max(SHORTEST_LOOK))),
                Ok(Asked::Queued) => {}
                Err(error) => {
                    // It may have been granted. A caller who chose the id may ask again.
                    if request.chosen_id {
                        pending.finish();
                    }
                    return Err(error);
                }
            }
            pause = SHORT_PAUSE;
            if let Some(seat) = &pending.seat {
                wait_for_turn(Arc::clone(&seat.wake), look_at, deadline).await;
            }
            // The last time without a wait, which leaves the line.
            listener = match Instant::now() < deadline {
                true => self.listen(deadline).await?,
                false => None,
            };
        }
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        for _ in 0..RENEWALS {
            match self.functions.renew(resource, id, request).await? {
                Renewed::Granted(token) => {
                    return Ok(Lease::granted(resource, id, token, request.ttl));
                }
                Renewed::Lost => return Err(LeaseError::lost(resource)),
                Renewed::Exhausted(max_token) => {
                    return Err(LeaseError::Exhausted {
                        resource: resource.clone(),
                        max_token,
                    });
                }
                Renewed::Again => sleep(SHORT_PAUSE).await,
            }
        }
        let busy = std::io::Error::from(std::io::ErrorKind::WouldBlock);
        Err(LeaseError::unavailable(busy))
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let released = self.functions.end(resource, id).await?;
        released
            .then_some(())
            .ok_or_else(|| LeaseError::lost(resource))
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.functions.inspect(resource).await
    }
}

impl PostgresLeases {
    /// Makes sure that this process listens; `None` where it cannot, so that the request has to ask again
    /// by itself.
    async fn listen(&self, deadline: Instant) -> Result<Option<i64>, LeaseError> {
        if !self.listener.is_possible() {
            return Ok(None);
        }
        let limit = after(LISTEN_WAIT).min(deadline);
        match timeout_at(limit, self.listener.listen()).await {
            Ok(Ok(listener)) => Ok(Some(listener)),
            Ok(Err(error)) if after(ASK_AGAIN) >= deadline => Err(error),
            Ok(Err(_)) | Err(_) => Ok(None),
        }
    }

    /// Tells the first in line, who has it when this lease ends, when that is. In a task: the holder need not
    /// wait for it.
    fn tell_the_first(&self, resource: &Resource) {
        let (functions, resource) = (self.functions.clone(), resource.clone());
        tokio::spawn(async move {
            // Where it fails, the next look of its process finds the end.
            let _ = functions.call_first(&resource).await;
        });
    }
}

impl Operate for PostgresLeases {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        self.functions.list(limit, cursor).await
    }

    async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        self.functions.break_lease(resource, seen).await
    }
}

/// Waits until asking again may help.
async fn wait_for_turn(wake: Arc<Wake>, mut look_at: Option<Instant>, deadline: Instant) {
    loop {
        let next_look = look_at.map_or(deadline, |look_at| look_at.min(deadline));
        tokio::select! {
            closed = wake.told() => match closed {
                Duration::ZERO => return,
                closed => look_at = Some(after(closed.max(SHORTEST_LOOK))),
            },
            () = sleep_until(next_look) => return,
        }
    }
}

impl fmt::Debug for PostgresLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresLeases").finish_non_exhaustive()
    }
}
