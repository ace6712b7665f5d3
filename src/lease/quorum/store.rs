//! The store on a quorum: it asks, and asks again.

use std::{fmt, sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use super::{
    answer::{Answer, Found},
    attempt::Attempt,
    grant::{Outcome, Wish, attempt, left_of},
    list::list,
    nodes::Nodes,
    pauses::{Pauses, SHORTEST_PAUSE},
    pending::Pending,
    renew::{Contended, exhausted},
    scripts::Take,
    shared::{Quorum, held_by_majority},
};
use crate::{
    announce::Announce,
    epochs::partition_of,
    lease::{
        Acquire, Announced, Held, Lease, LeaseError, LeaseId, Leases, ListError, Operate, Owner,
        Page, Renew, memory::Memory, redis::unexpected, stored_id::StoredId, time::after,
    },
    token::{Resource, Token},
};

/// Leases on a majority of Redis servers that stand alone, three or five of them. Cheap to clone; clones share their
/// connections.
///
/// It goes on while a majority of its nodes does, without a failover, and whatever the others have lost. Where one
/// Redis or a Postgres will do, [`RedisLeases`](crate::lease::RedisLeases) and
/// [`PostgresLeases`](crate::lease::PostgresLeases) are simpler, faster and as safe: what makes writes safe is the
/// fence. The guide says more.
///
/// - The time of a lease counts from the answer: `Lease::ttl` is what is left of the time that was asked for.
/// - **There is no line**: a request that waits asks again and again, after random pauses, so leases are not granted in
///   the order in which they were asked for. A lease of which no request is waiting is granted at once.
/// - The nodes stand alone: no replicas, no Sentinel, no Cluster. A node that has replicas is refused.
/// - The nodes are noted in each clock, by host, port and database as the URLs name them. Issuers with other nodes, or
///   with other names for them, are refused.
///
/// # Example
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// use axum::Router;
/// use tower_fence::{Fence, issuer, lease::QuorumLeases};
///
/// let fence = Fence::new(pool);
/// let nodes = ["redis://a", "redis://b", "redis://c"];
/// let leases = QuorumLeases::connect(&nodes, fence.clone()).await?;
///
/// let app: Router = Router::new().nest("/locks", issuer::router(leases.announced_to(fence)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct QuorumLeases {
    quorum: Arc<Quorum>,
    seats: Arc<Semaphore>,
}

impl QuorumLeases {
    pub(super) fn new(
        nodes: Nodes,
        memory: Arc<Memory>,
        limit: Duration,
        max_waiters: usize,
    ) -> Self {
        Self {
            quorum: Arc::new(Quorum {
                nodes,
                memory,
                limit,
            }),
            seats: Arc::new(Semaphore::new(max_waiters.min(Semaphore::MAX_PERMITS))),
        }
    }

    pub(super) fn quorum(&self) -> &Quorum {
        &self.quorum
    }

    /// These leases, each grant announced to `resources`, a `Fence`, before it is answered. What that
    /// promises: [`Announced`].
    pub fn announced_to<A: Announce>(self, resources: A) -> Announced<Self, A> {
        Announced::new(self, resources)
    }

    fn seat(&self, resource: &Resource) -> Result<OwnedSemaphorePermit, LeaseError> {
        let seat = Arc::clone(&self.seats).try_acquire_owned();
        seat.map_err(|_| LeaseError::too_many_waiters(resource))
    }
}

/// How often a request is repeated to which too few nodes have answered.
const REPETITIONS: usize = 1;

impl Leases for QuorumLeases {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        check_ttl(request.ttl)?;
        let deadline = after(request.wait);
        let until = deadline.max(after(self.quorum.limit));
        let id = StoredId::of(&request.lease_id);
        let take = Take {
            id: &id,
            ttl: request.ttl,
            lock_delay: request.lock_delay,
            owner: request.owner.as_ref().map_or("", Owner::as_str),
            only_mine: false,
        };
        let wish = Wish {
            resource,
            take,
            at_least: None,
        };
        let mut pending = Pending::new(&self.quorum, resource, id.clone());
        let (mut next, mut pauses, mut failures) = (Attempt::now(), Pauses::default(), 0);
        let mut seat = None;
        loop {
            let quorum = &self.quorum;
            let outcome =
                attempt(&quorum.nodes, &quorum.memory, wish, next, &mut pending.left).await;
            if let Ok(Outcome::Granted { token, left }) = outcome {
                pending.finish();
                return Ok(Lease::granted(resource, &request.lease_id, token, left));
            }
            // Others may have it meanwhile.
            pending.clean_up().await;
            next = Attempt::now();
            if outcome.is_ok() {
                failures = 0;
            }
            let held = |left| LeaseError::Held {
                resource: resource.clone(),
                retry_after: left,
            };
            let (error, gives_up) = match outcome {
                Ok(Outcome::Held { left }) => {
                    if seat.is_none() && Instant::now() < deadline {
                        seat = Some(self.seat(resource)?);
                    }
                    (held(left), deadline)
                }
                Ok(Outcome::Split { left }) => (held(left.max(SHORTEST_PAUSE)), until),
                Ok(Outcome::Older { number }) => {
                    next = Attempt::above(number);
                    (LeaseError::unavailable(Contended), until)
                }
                Ok(Outcome::TooLate) => (LeaseError::unavailable(TooLate), Instant::now()),
                Ok(Outcome::Exhausted) => return Err(exhausted(resource)),
                Ok(Outcome::Granted { .. } | Outcome::Lost) => return Err(unexpected()),
                Err(error) if failures == REPETITIONS => return Err(error),
                Err(error) => {
                    failures += 1;
                    (error, until)
                }
            };
            if Instant::now() >= gives_up {
                return Err(error);
            }
            pauses.pause(gives_up).await;
        }
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        check_ttl(request.ttl)?;
        let Some(at_least) = request.at_least else {
            return match request.new_token {
                true => {
                    self.quorum
                        .another_token(resource, id, request.ttl, None)
                        .await
                }
                false => self.quorum.same_token(resource, id, request.ttl).await,
            };
        };
        // The resource has seen a higher token than this store's.
        self.quorum.memory.doubt(partition_of(resource));
        let lease = self.quorum.same_token(resource, id, request.ttl).await?;
        if lease.token >= at_least && !request.new_token {
            return Ok(lease);
        }
        let at_least = Some(at_least);
        self.quorum
            .another_token(resource, id, request.ttl, at_least)
            .await
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let stored_id = StoredId::of(id);
        let looks = self.quorum.look(resource).await?;
        let is_mine = |found: &Found| found.id == stored_id.as_str() && found.left.is_some();
        let ends = self.quorum.end(resource, &looks, is_mine).await?;
        let ended = ends.count(|answer| matches!(answer, Answer::Ended));
        let lost = |answer: &Answer| !matches!(answer, Answer::Found(found) if is_mine(found));
        if looks.prevents(lost) {
            return Err(LeaseError::lost(resource));
        }
        // Where no majority is left that has it, it is over.
        let nodes = &self.quorum.nodes;
        match looks.count(lost) + ended > nodes.all().len() - nodes.majority() {
            true => Ok(()),
            false => Err(ends.no_majority()),
        }
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        let looks = self.quorum.look(resource).await?;
        if !looks.are_enough() {
            return Err(looks.no_majority());
        }
        Ok(held_by_majority(&looks, self.quorum.nodes.majority()))
    }
}

/// How often a lease is looked for and ended that changes meanwhile.
const BREAKS: usize = 20;

impl Operate for QuorumLeases {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        list(&self.quorum, limit, cursor).await
    }

    async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        if let Some(seen) = seen {
            return self.break_seen(resource, seen).await;
        }
        let id = |answer: &Answer| match answer {
            Answer::Found(found) => Some(found.id.clone()),
            _ => None,
        };
        let mut was_held = false;
        for _ in 0..BREAKS {
            let looks = self.quorum.look(resource).await?;
            if !looks.are_enough() {
                return Err(looks.no_majority());
            }
            was_held |= looks.majority(id).is_some();
            // What has no majority may be in the way of one.
            let ends = self.quorum.end(resource, &looks, |_| true).await?;
            let found = looks.count(|answer| matches!(answer, Answer::Found(_)));
            // A renewal with a new token may have come in between.
            if ends.count(|answer| matches!(answer, Answer::Ended)) == found {
                return Ok(was_held);
            }
        }
        Err(LeaseError::unavailable(Contended))
    }
}

impl QuorumLeases {
    /// Ends the lease that a majority has with this token, on every node that has it.
    async fn break_seen(&self, resource: &Resource, seen: Token) -> Result<bool, LeaseError> {
        let id = |answer: &Answer| match answer {
            Answer::Found(found) if found.token == Some(seen) => Some(found.id.clone()),
            _ => None,
        };
        let mut has_ended = false;
        for _ in 0..BREAKS {
            let looks = self.quorum.look(resource).await?;
            if !looks.are_enough() {
                return Err(looks.no_majority());
            }
            let Some(id) = looks.majority(id) else {
                return Ok(has_ended);
            };
            // Each node ends the very value that was found there.
            let is_one = |found: &Found| found.id == id;
            let ends = self.quorum.end(resource, &looks, is_one).await?;
            let found = looks.count(|answer| matches!(answer, Answer::Found(one) if is_one(one)));
            let ended = ends.count(|answer| matches!(answer, Answer::Ended));
            has_ended |= ended > 0;
            if ended == found {
                return Ok(true);
            }
        }
        Err(LeaseError::unavailable(Contended))
    }
}

/// Refuses a time of which nothing would be left.
fn check_ttl(ttl: Duration) -> Result<(), LeaseError> {
    match left_of(ttl, Instant::now()) {
        Some(_) => Ok(()),
        None => Err(LeaseError::Invalid {
            field: "ttl_ms".into(),
            detail: "a lease on a quorum lasts longer than 2 ms and one percent of its time".into(),
        }),
    }
}

/// No lease was left to be granted.
#[derive(Debug, thiserror::Error)]
#[error("the time of the lease was over before a majority of the nodes had it")]
struct TooLate;

impl fmt::Debug for QuorumLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumLeases").finish_non_exhaustive()
    }
}
