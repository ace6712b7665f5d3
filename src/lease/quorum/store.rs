//! The store on a quorum: it asks, and asks again.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep},
};

use super::{
    answer::{Answer, Clock, Found},
    attempt::Attempt,
    grant::{Outcome, Wish, attempt, left_of},
    nodes::{Answers, Nodes},
    pending::{Left, Pending},
    scripts::Take,
};
use crate::{
    announce::Announce,
    epochs::{Epoch, SourceId, partition_of},
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

pub(super) struct Quorum {
    nodes: Nodes,
    memory: Arc<Memory>,
    limit: Duration,
}

impl Quorum {
    pub(super) const fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    pub(super) fn source(&self) -> &str {
        self.memory.source().map_or("", SourceId::as_str)
    }

    /// What each node has of a lease.
    pub(super) async fn look(&self, resource: &Resource) -> Result<Answers, LeaseError> {
        let look = |_| Some(self.nodes.scripts().look(resource));
        self.nodes.ask(self.source(), look).await
    }
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

    /// A token above the one that the lease has.
    async fn another_token(
        &self,
        resource: &Resource,
        id: &LeaseId,
        ttl: Duration,
        at_least: Option<Token>,
    ) -> Result<Lease, LeaseError> {
        let stored_id = StoredId::of(id);
        let take = Take {
            id: &stored_id,
            ttl,
            lock_delay: Duration::ZERO,
            owner: "",
            only_mine: true,
        };
        let wish = Wish {
            resource,
            take,
            at_least,
        };
        let until = after(self.quorum.limit);
        let (mut next, mut pauses) = (Attempt::now(), Pauses::default());
        loop {
            // Nothing of it is taken back: the lease is held under its earlier token.
            let (quorum, mut left) = (&self.quorum, Left::default());
            let outcome = attempt(&quorum.nodes, &quorum.memory, wish, next, &mut left).await?;
            next = match outcome {
                Outcome::Granted { token, left } => {
                    return Ok(Lease::granted(resource, id, token, left));
                }
                Outcome::Lost | Outcome::TooLate => return Err(LeaseError::lost(resource)),
                Outcome::Exhausted => return Err(exhausted(resource)),
                Outcome::Older { number } => Attempt::above(number),
                Outcome::Held { .. } | Outcome::Split { .. } => Attempt::now(),
            };
            if Instant::now() >= until {
                return Err(LeaseError::unavailable(Contended));
            }
            pauses.pause(until).await;
        }
    }

    /// The lease for as long again, with the token it has.
    async fn same_token(
        &self,
        resource: &Resource,
        id: &LeaseId,
        ttl: Duration,
    ) -> Result<Lease, LeaseError> {
        let (quorum, partition) = (&self.quorum, partition_of(resource));
        let (seen, began) = (quorum.memory.highest(partition), Instant::now());
        let stored_id = StoredId::of(id);
        let scripts = quorum.nodes.scripts();
        let renew = |_| Some(scripts.renew(quorum.source(), resource, &stored_id, ttl));
        let answers = quorum.nodes.ask(quorum.source(), renew).await?;
        let token = answers.majority(|answer| match answer {
            Answer::Renewed { token, .. } => Some(*token),
            _ => None,
        });
        let Some(token) = token else {
            // Where its tokens differ, a new one was not sealed on a majority, and another call may do so.
            return Err(
                match answers.prevents(|answer| matches!(answer, Answer::Lost)) {
                    true => LeaseError::lost(resource),
                    false => answers.no_majority(),
                },
            );
        };
        let clocks = answers.given.iter().filter_map(|(_, answer)| match answer {
            Answer::Renewed { clock, .. } => Some(*clock),
            _ => None,
        });
        // Clocks that were put back, or an epoch that is over: its tokens may be outranked.
        let usable = clocks.clone().filter(|clock| clock.usable);
        let is_behind = usable
            .map(Clock::counted)
            .max()
            .is_none_or(|highest| highest < seen);
        let Some(left) = left_of(ttl, began).filter(|_| !is_behind) else {
            return Err(LeaseError::lost(resource));
        };
        if let Some((epoch, n)) = quorum.nodes.counted(clocks) {
            let epoch = Epoch::new(epoch).map_err(LeaseError::unavailable)?;
            quorum.memory.record_renewal(partition, epoch, n);
        }
        Ok(Lease::granted(resource, id, token, left))
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
        let Some(at_least) = request.at_least else {
            return match request.new_token {
                true => self.another_token(resource, id, request.ttl, None).await,
                false => self.same_token(resource, id, request.ttl).await,
            };
        };
        // The resource has seen a higher token than this store's.
        self.quorum.memory.doubt(partition_of(resource));
        let lease = self.same_token(resource, id, request.ttl).await?;
        if lease.token >= at_least && !request.new_token {
            return Ok(lease);
        }
        let at_least = Some(at_least);
        self.another_token(resource, id, request.ttl, at_least)
            .await
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let stored_id = StoredId::of(id);
        let looks = self.quorum.look(resource).await?;
        let is_mine = |found: &Found| found.id == stored_id.as_str() && found.left.is_some();
        let ends = end(&self.quorum, resource, &looks, is_mine).await?;
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

impl Operate for QuorumLeases {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        super::list::list(&self.quorum, limit, cursor).await
    }

    async fn break_lease(&self, resource: &Resource) -> Result<bool, LeaseError> {
        let looks = self.quorum.look(resource).await?;
        if !looks.are_enough() {
            return Err(looks.no_majority());
        }
        // What has no majority may be in the way of one.
        let ends = end(&self.quorum, resource, &looks, |_| true).await?;
        let found = looks.count(|answer| matches!(answer, Answer::Found(_)));
        let ended = ends.count(|answer| matches!(answer, Answer::Ended));
        if ended < found && !ends.are_enough() {
            return Err(ends.no_majority());
        }
        let id = |answer: &Answer| match answer {
            Answer::Found(found) => Some(found.id.clone()),
            _ => None,
        };
        Ok(looks.majority(id).is_some())
    }
}

/// There is no token above the one that the lease has.
fn exhausted(resource: &Resource) -> LeaseError {
    LeaseError::Exhausted {
        resource: resource.clone(),
        max_token: Token::MAX.get(),
    }
}

/// Ends on each node what was found there, if it is one of these.
async fn end(
    quorum: &Quorum,
    resource: &Resource,
    looks: &Answers,
    is_one: impl Fn(&Found) -> bool,
) -> Result<Answers, LeaseError> {
    let end = |n: usize| {
        let found = looks.given.iter().find_map(|(node, answer)| match answer {
            Answer::Found(found) if *node == n && is_one(found) => Some(found),
            _ => None,
        });
        Some(quorum.nodes.scripts().end(resource, found?))
    };
    quorum.nodes.ask(quorum.source(), end).await
}

/// The lease that a majority has, under the same id and with the same token.
pub(super) fn held_by_majority(looks: &Answers, majority: usize) -> Option<Held> {
    let mut held: HashMap<_, Vec<_>> = HashMap::new();
    for (_, answer) in &looks.given {
        if let Answer::Found(found) = answer
            && let (Some(token), Some(left)) = (found.token, found.left)
        {
            let same = held.entry((&found.id, token)).or_default();
            same.push((left, &found.owner));
        }
    }
    let ((_, token), mut nodes) = held
        .into_iter()
        .find(|(_, nodes)| nodes.len() >= majority)?;
    // When so many have let it go that it has no majority.
    nodes.sort_unstable_by_key(|(left, _)| std::cmp::Reverse(*left));
    let (ttl, owner) = nodes.get(majority - 1)?;
    Some(Held {
        token,
        owner: (*owner).clone(),
        ttl: *ttl,
        waiters: 0,
    })
}

/// Random pauses, longer each time.
struct Pauses(Duration);

const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(300);

impl Default for Pauses {
    fn default() -> Self {
        Self(SHORTEST_PAUSE)
    }
}

impl Pauses {
    async fn pause(&mut self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        sleep(self.0.mul_f64(rand::random_range(0.1..1.5)).min(left)).await;
        self.0 = (2 * self.0).min(LONGEST_PAUSE);
    }
}

/// Requests under one lease id were in each other's way.
#[derive(Debug, thiserror::Error)]
#[error("other requests under the same lease id are under way")]
struct Contended;

/// No lease was left to be granted.
#[derive(Debug, thiserror::Error)]
#[error("the time of the lease was over before a majority of the nodes had it")]
struct TooLate;

impl fmt::Debug for QuorumLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumLeases").finish_non_exhaustive()
    }
}
