//! Interface of a store's backend: a few atomic steps, from which [`Driver`](super::Driver) builds
//! [`Leases`](super::Leases).
//!
//! 1. A step is executed completely or not at all, and the steps on one resource are executed one
//!    after the other.
//! 2. A step can arrive twice, and its response can be lost. Steps are therefore idempotent by
//!    lease id. For example, a second acquisition under the id of the held lease returns its token
//!    and restarts its TTL.
//! 3. Each token of a resource is higher than all earlier ones, even if the store has lost data in
//!    between. A store that never loses confirmed data may count tokens by itself. Any other store
//!    counts within an epoch; see [`Reply::NeedsEpoch`].
//! 4. A queue is optional. A store without a queue replies with [`Reply::Held`], and the driver
//!    retries.
//!
//! The [conformance suite](super::conformance) (feature `testing`) tests a backend. The example
//! `sql_store` implements a backend with a single table.

use std::time::Duration;

use derive_where::derive_where;

use super::{Held, LeaseError, Owner, Page, Turns, counters::KnownCounters};
pub use super::{expiring::Expiring, names::Names};
use crate::{
    announce::LeaseDigest,
    epochs::{Epoch, SourceId, partition_of},
    key_id::is_plain,
    token::{Resource, Token},
};

/// Backend of a lease store.
///
/// No method waits for a lease to end, because the driver does that. Every method except
/// [`listen`](Self::listen) must apply its own timeout, so that a caller does not wait
/// indefinitely.
pub trait Backend: Send + Sync + 'static {
    /// Executes one step, atomically.
    ///
    /// `seen` is the highest state of the token counter that this process has seen. A store that
    /// counts by itself ignores `seen`.
    ///
    /// # Errors
    ///
    /// Returns [`LeaseError::Unavailable`] if the outcome is unknown or the store does not respond,
    /// and [`LeaseError::Misconfigured`] if a retry cannot help.
    fn step(
        &self,
        resource: &Resource,
        step: Step<'_>,
        seen: Seen<'_>,
    ) -> impl Future<Output = Result<Reply, LeaseError>> + Send;

    /// Begins an epoch on exactly the counter that a step has named in [`Reply::NeedsEpoch`], with
    /// no tokens counted yet. Returns false, and changes nothing, if the counter has changed since.
    ///
    /// The default implementation is for stores that never need an epoch.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`step`](Self::step).
    fn begin_epoch(
        &self,
        resource: &Resource,
        counter: &BlankCounter,
        epoch: Epoch,
        seen: Seen<'_>,
    ) -> impl Future<Output = Result<bool, LeaseError>> + Send {
        let _ = (resource, counter, epoch, seen);
        async { Ok(false) }
    }

    /// Reads the held lease. A lease that has ended, or is in its lock delay, is not held.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`step`](Self::step).
    fn inspect(
        &self,
        resource: &Resource,
        seen: Seen<'_>,
    ) -> impl Future<Output = Result<Option<Held>, LeaseError>> + Send;

    /// Lists at most `limit` held leases, starting after the page with this cursor. If `limit` is
    /// 0, lists at most one.
    ///
    /// A lease that is held during the whole listing must be on one of its pages, even if other
    /// leases end during the listing.
    ///
    /// # Errors
    ///
    /// Returns [`LeaseError::invalid_cursor`] if this store cannot have returned the cursor, and
    /// the errors of [`step`](Self::step).
    fn page(
        &self,
        limit: usize,
        cursor: Option<&str>,
        counters: Counters<'_>,
    ) -> impl Future<Output = Result<Page, LeaseError>> + Send;

    /// Receives notifications about requests in the store's queue, until the connection is lost.
    ///
    /// The driver runs this method in one task as soon as a request waits. The method calls
    /// [`Turns::ready`] when it begins to receive notifications, and then passes them on to
    /// `turns`. When the method returns, every waiting request retries its step, and the driver
    /// calls the method again.
    ///
    /// The default implementation is for stores that send no notifications.
    ///
    /// # Errors
    ///
    /// Returns the reason why no notifications can be received. Until a later call succeeds,
    /// waiting requests poll.
    fn listen(&self, turns: &Turns) -> impl Future<Output = Result<(), LeaseError>> + Send {
        async {
            turns.ready(0);
            std::future::pending().await
        }
    }

    /// Subscribes to the notifications of a resource.
    ///
    /// The driver calls this method before a request joins the resource's queue, while
    /// [`listen`](Self::listen) runs. The default implementation is for stores that need no
    /// subscription per resource.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`listen`](Self::listen).
    fn follow(&self, resource: &Resource) -> impl Future<Output = Result<(), LeaseError>> + Send {
        let _ = resource;
        async { Ok(()) }
    }

    /// Returns the key prefix of the store's counters, for error messages. Default: empty.
    fn key_prefix(&self) -> &str {
        ""
    }
}

/// Checks the key prefix of a store: one or more characters of `A-Z a-z 0-9 - _ .`.
///
/// In each key, a colon follows the prefix. A prefix contains no colon, so no key of another prefix
/// begins with this prefix and a colon. A prefix also contains no invisible characters.
///
/// # Errors
///
/// Returns [`LeaseError::Invalid`] with the field `key_prefix` for any other prefix.
pub fn check_key_prefix(prefix: &str) -> Result<(), LeaseError> {
    if prefix.is_empty() || !prefix.bytes().all(is_plain) {
        let detail = "must be one or more characters of A-Z a-z 0-9 - _ .";
        return Err(LeaseError::invalid("key_prefix", detail));
    }
    Ok(())
}

/// Step on one resource.
///
/// To any step, a store may also reply with [`Again`](Reply::Again). To an acquisition or a
/// renewal, a store that counts within epochs may also reply with
/// [`NeedsEpoch`](Reply::NeedsEpoch), [`Behind`](Reply::Behind) or
/// [`OtherSource`](Reply::OtherSource).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Step<'a> {
    /// Grants a free lease, returns the lease that is held under this id, joins the queue, or
    /// reports how long the resource stays blocked. The reply is [`Granted`](Reply::Granted),
    /// [`Held`](Reply::Held), [`Queued`](Reply::Queued), [`Displaced`](Reply::Displaced), or
    /// [`Exhausted`](Reply::Exhausted).
    Acquire(&'a Ask, &'a Waits),
    /// Restarts the TTL of a held lease. The reply is [`Granted`](Reply::Granted),
    /// [`Lost`](Reply::Lost), or [`Exhausted`](Reply::Exhausted).
    Renew(&'a Renewal),
    /// Releases, abandons or breaks a lease. The reply is [`Ended`](Reply::Ended) or
    /// [`Lost`](Reply::Lost). The store grants the lease to the next request in the queue, or
    /// notifies that request to retry.
    End(&'a End),
}

/// Request for a lease. If its step is repeated, the request stays the same.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Ask {
    /// The digest of the lease id, which a store may keep.
    pub lease: LeaseDigest,
    /// A random positive number that distinguishes this request from others under the same lease
    /// id.
    pub ticket: i64,
    /// The TTL of the lease, from the moment of the step, in whole milliseconds, at least 1.
    pub ttl: Duration,
    /// How long the resource stays blocked after the lease has expired.
    pub lock_delay: Duration,
    /// The owner label, for operators. A lease keeps the first owner that was named under its id.
    pub owner: Option<Owner>,
}

/// How a request waits in the store's queue.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Waits {
    /// The request does not wait, and was not in the queue.
    No,
    /// The request joins the queue, or stays in it. If a request under the same lease id is already
    /// queued, the new request displaces it and takes its position.
    Yes {
        /// The number under which the store notifies this process. It is the argument of
        /// [`Turns::ready`].
        listener: i64,
        /// How long the request will still wait, including the time in which its client may retry.
        left: Duration,
        /// Whether the request may have been queued before. If another request has displaced it,
        /// the reply is [`Reply::Displaced`]. If it is no longer in the queue, it joins again.
        queued: bool,
    },
    /// The request no longer waits. It leaves the queue, unless the lease is granted to it.
    Leaves,
}

/// Renewal of a lease.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Renewal {
    /// The digest of the lease id, which a store may keep.
    pub lease: LeaseDigest,
    /// The TTL of the lease, from the moment of the step, in whole milliseconds, at least 1.
    pub ttl: Duration,
    /// Whether the lease gets a new token.
    pub new_token: bool,
    /// The lowest token that the lease may have after the renewal. This minimum applies to this
    /// lease only, and the counter is not raised to it. A store that does not support a minimum
    /// returns [`LeaseError::Invalid`].
    pub at_least: Option<Token>,
}

impl Renewal {
    /// Returns whether the lease may get a new token. Otherwise it keeps its token.
    #[must_use]
    pub const fn may_take_token(&self) -> bool {
        self.new_token || self.at_least.is_some()
    }
}

/// Lease that a step releases, abandons or breaks.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum End {
    /// The lease that is held under this id. If a request of another process waits under this id
    /// instead, the store notifies that process, or removes the position of the request, which the
    /// process detects. The process then calls [`Turns::call_off`]. The reply is
    /// [`Lost`](Reply::Lost).
    Release(LeaseDigest),
    /// The traces of one request: its position in the queue, and its lease, unless the store also
    /// granted that lease to another request under the same id. A store may keep a lease that was
    /// renewed.
    Abandon {
        /// The digest of the lease id, which a store may keep.
        lease: LeaseDigest,
        /// The request, identified by its [`Ask::ticket`].
        ticket: i64,
    },
    /// The lease with this token, or any lease if there is no token. This includes a lease in its
    /// lock delay.
    Break(Option<Token>),
}

/// Reply of the store to a step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Reply {
    /// The lease is held under the id of the step.
    Granted(Granted),
    /// Another holder has the lease, or another request is the first in the queue. The request of
    /// this step is not in the queue.
    Held {
        /// How long the resource stays blocked, unless the lease is released or renewed.
        left: Duration,
    },
    /// The request is in the queue.
    Queued {
        /// How long the resource stays blocked, unless the lease is released or renewed.
        left: Duration,
        /// Whether this step added the request to the queue.
        joined: bool,
    },
    /// Another request under the same lease id has taken the position of this request.
    Displaced,
    /// A conflicting step is in progress. The driver repeats this step after a pause.
    Again,
    /// The lease is not held under this id.
    Lost,
    /// The lease has ended.
    Ended,
    /// No token is left above this number.
    Exhausted(i64),
    /// The token counter of the partition cannot be used: it is missing, the store has lost data
    /// since it was written, or its epoch has no token left. The driver takes an epoch from
    /// [`Epochs`](crate::epochs::Epochs), begins it on exactly this counter, and repeats the step.
    NeedsEpoch(BlankCounter),
    /// The counter is lower than `seen`, for example because it was restored from an earlier copy.
    /// If [`Seen::replace`] is set, the store replaces the counter with a blank one instead of
    /// returning this reply.
    Behind,
    /// The counter belongs to another source of epochs, with this name.
    OtherSource(String),
}

/// Lease that a step has granted or renewed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Granted {
    /// The lease's token.
    pub token: Token,
    /// The lease's TTL.
    pub ttl: Duration,
    /// The highest token that the partition's counter has reached, as an epoch and a number within
    /// it.
    pub counted: Option<(Epoch, i64)>,
}

impl Granted {
    /// Creates the reply of a store that counts by itself.
    #[must_use]
    pub const fn new(token: Token, ttl: Duration) -> Self {
        Self {
            token,
            ttl,
            counted: None,
        }
    }

    /// Sets the highest token that the partition's counter has reached.
    #[must_use]
    pub const fn counted(mut self, epoch: Epoch, n: i64) -> Self {
        self.counted = Some((epoch, n));
        self
    }
}

/// Token counter that cannot be used until an epoch begins on it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlankCounter {
    /// The highest epoch that has ever begun on the counter, or 0 if none has. The new epoch must
    /// be higher.
    pub epoch: i64,
    /// A mark that distinguishes this counter from earlier and later ones of the partition.
    pub mark: String,
}

impl BlankCounter {
    /// Creates a counter from its last epoch and its mark.
    pub fn new(epoch: i64, mark: impl Into<String>) -> Self {
        Self {
            epoch,
            mark: mark.into(),
        }
    }
}

/// Highest state of a partition's token counter that this process has seen.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Seen<'a> {
    /// The source of the counter's epochs, or `None` if this process has not needed it yet. Steps
    /// that take no new token do not need it.
    pub source: Option<&'a SourceId>,
    /// The highest epoch that this process has seen, or 0 if it has seen none.
    pub epoch: i64,
    /// The highest number that this process has seen in that epoch.
    pub n: i64,
    /// Whether a counter below these values is replaced with a blank one.
    pub replace: bool,
}

/// For each partition, the highest state of its token counter that this process has seen.
#[derive(Clone, Copy)]
#[derive_where(Debug)]
#[derive_where(skip_inner)]
pub struct Counters<'a>(Option<&'a KnownCounters>);

impl<'a> Counters<'a> {
    pub(super) const fn of(counters: Option<&'a KnownCounters>) -> Self {
        Self(counters)
    }

    /// Returns the highest state of the counter of a resource's partition that this process has
    /// seen.
    #[must_use]
    pub fn seen(self, resource: &Resource) -> Seen<'a> {
        let Some(counters) = self.0 else {
            return Seen::default();
        };
        let (epoch, n) = counters.highest(partition_of(resource));
        Seen {
            source: counters.source(),
            epoch,
            n,
            replace: false,
        }
    }
}
