//! What a store has to do: a few atomic steps. [`Driver`](super::Driver) makes [`Leases`](super::Leases) of them.
//!
//! 1. A step happens as a whole or not at all, and no other step of the same resource happens in
//!    between.
//! 2. A step may arrive twice, and its answer may be lost. Steps are idempotent by lease id: to
//!    acquire again under the id of the lease that is held returns its token and starts its time anew.
//! 3. Each token of a resource is higher than all earlier ones, whatever the store has lost
//!    meanwhile. A store that keeps what it has confirmed may count by itself. Any other counts within an
//!    epoch, see [`Reply::NeedsEpoch`].
//! 4. A queue is optional. A store without one answers [`Reply::Held`], and the driver retries.
//!
//! The [conformance suite](super::conformance) (feature `testing`) checks a store. The example
//! `sql_store` is a store over one table.

use std::{fmt, time::Duration};

use super::{Held, LeaseError, ListError, Owner, Page, Turns, counters::KnownCounters};
use crate::{
    announce::LeaseDigest,
    epochs::{Epoch, SourceId, partition_of},
    token::{Resource, Token},
};

/// A lease store, as its driver sees it.
///
/// No method waits for a lease to end: the driver does. A method that is called for longer than a
/// caller would wait returns an error by itself.
pub trait Backend: Send + Sync + 'static {
    /// Executes one step, atomically.
    ///
    /// `seen` is what this process knows of the token counter. A store that counts by itself ignores it.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Unavailable`] if the outcome is unknown or the store does not answer, and
    /// [`LeaseError::Misconfigured`] if that does not pass by itself.
    fn step(
        &self,
        resource: &Resource,
        step: Step<'_>,
        seen: Seen<'_>,
    ) -> impl Future<Output = Result<Reply, LeaseError>> + Send;

    /// Begins an epoch on the very counter that a step has named in [`Reply::NeedsEpoch`], with no token
    /// counted yet. Returns false, and changes nothing, if the counter has changed since.
    ///
    /// The default is for stores that never need an epoch.
    ///
    /// # Errors
    ///
    /// Like [`step`](Self::step).
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

    /// Reads who holds the lease. A lease that has ended, or is in its lock delay, is not held.
    ///
    /// # Errors
    ///
    /// Like [`step`](Self::step).
    fn inspect(
        &self,
        resource: &Resource,
        seen: Seen<'_>,
    ) -> impl Future<Output = Result<Option<Held>, LeaseError>> + Send;

    /// Lists some of the held leases, about `limit`, from where the page with this cursor ended.
    ///
    /// A lease that is held during the whole listing is on one of its pages, whatever ends meanwhile.
    ///
    /// # Errors
    ///
    /// [`ListError::Cursor`] if no page has this cursor, and those of [`step`](Self::step).
    fn page(
        &self,
        limit: usize,
        cursor: Option<&str>,
        counters: Counters<'_>,
    ) -> impl Future<Output = Result<Page, ListError>> + Send;

    /// Hears of the turns of requests that wait in the store's queue, until it can hear no more.
    ///
    /// The driver runs this in one task as soon as a request waits. It calls [`Turns::ready`] when it
    /// hears, and passes on what it hears. When it returns, every waiting request asks the store, and
    /// the driver runs it again.
    ///
    /// The default is for stores that notify nobody.
    ///
    /// # Errors
    ///
    /// Why the store cannot be heard. The requests that wait for it poll meanwhile.
    fn listen(&self, turns: &Turns) -> impl Future<Output = Result<(), LeaseError>> + Send {
        async {
            turns.ready("");
            std::future::pending().await
        }
    }

    /// Makes sure that the turns of a resource are heard. Called before a request joins its queue,
    /// while [`listen`](Self::listen) runs. The default is for stores that need nothing for that.
    ///
    /// # Errors
    ///
    /// Like [`listen`](Self::listen).
    fn follow(&self, resource: &Resource) -> impl Future<Output = Result<(), LeaseError>> + Send {
        let _ = resource;
        async { Ok(()) }
    }

    /// The key prefix under which the store has its counters, for error messages. Default: none.
    fn key_prefix(&self) -> &str {
        ""
    }

    /// How often a request that is in the queue asks by itself, for stores that notify nobody. `None`
    /// (default) if [`listen`](Self::listen) hears of every turn.
    fn poll_interval(&self) -> Option<Duration> {
        None
    }
}

/// A step on one resource.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Step<'a> {
    /// Grants a free lease, returns the one that is held under this id, joins the queue, or says what is
    /// in the way. Answered [`Granted`](Reply::Granted), [`Held`](Reply::Held),
    /// [`Queued`](Reply::Queued), [`Displaced`](Reply::Displaced), [`Exhausted`](Reply::Exhausted).
    Acquire(&'a Ask, Waits<'a>),
    /// Starts the time of a held lease anew. Answered [`Granted`](Reply::Granted),
    /// [`Lost`](Reply::Lost), [`Exhausted`](Reply::Exhausted).
    Renew(&'a Renewal),
    /// Ends a lease. Answered [`Ended`](Reply::Ended) or [`Lost`](Reply::Lost). The next in the queue is
    /// granted the lease, or is told to ask.
    End(&'a End),
}

/// A request for a lease. The same at each repetition of its step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Ask {
    /// The lease id, as a store may keep it.
    pub lease: LeaseDigest,
    /// A random number that tells this request from others under the same lease id. Positive.
    pub ticket: i64,
    /// How long the lease lasts, from the moment of the step. Whole milliseconds, at least 1.
    pub ttl: Duration,
    /// How long the resource stays blocked when the lease ends by time.
    pub lock_delay: Duration,
    /// The holder, for operators. The owner that was named first under a lease id stays.
    pub owner: Option<Owner>,
}

/// Whether a request waits in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Waits<'a> {
    /// It does not wait, and was not in the queue.
    No,
    /// It joins the queue, or stays there. A request under the same lease id that is there already
    /// is displaced: this one takes its position.
    Yes {
        /// How the store reaches this process: what [`Turns::ready`] was called with.
        listener: &'a str,
        /// How long it is going to wait.
        left: Duration,
        /// Whether it was put in the queue before. If another request has displaced it since, the
        /// answer is [`Reply::Displaced`]. If it is in the queue no more, it joins again.
        queued: bool,
    },
    /// It waits no more: it leaves the queue, unless it is granted the lease.
    Leaves,
}

/// A renewal.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Renewal {
    /// The lease id, as a store may keep it.
    pub lease: LeaseDigest,
    /// How long the lease lasts, from the moment of the step. Whole milliseconds, at least 1.
    pub ttl: Duration,
    /// Whether the lease gets a new token.
    pub new_token: bool,
    /// The lowest token that the lease may have from now on. The counter does not follow: this concerns
    /// the one lease. A store that cannot do that answers [`LeaseError::Invalid`].
    pub at_least: Option<Token>,
}

/// Which lease a step ends.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum End {
    /// The lease that is held under this id.
    Release(LeaseDigest),
    /// What this request has left behind: its position in the queue, and a lease that no other request
    /// under the same id was granted.
    Abandon {
        /// The lease id, as a store may keep it.
        lease: LeaseDigest,
        /// The request: [`Ask::ticket`].
        ticket: i64,
    },
    /// The lease that has this token, or any, also in its lock delay.
    Break(Option<Token>),
}

/// The answer to a step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Reply {
    /// The lease is held under the id of the step.
    Granted(Granted),
    /// Another holder has the lease, or it is another request's turn. The request is not in the queue.
    Held {
        /// How long the resource stays blocked, if nothing happens.
        left: Duration,
    },
    /// The request is in the queue.
    Queued {
        /// How long the resource stays blocked, if nothing happens.
        left: Duration,
        /// Whether it was not there before this step.
        joined: bool,
    },
    /// Another request under the same lease id waits in its place.
    Displaced,
    /// Another step was in the way. The driver repeats this one in a moment.
    Again,
    /// The lease is not held under this id.
    Lost,
    /// The lease has ended.
    Ended,
    /// There is no token above this one.
    Exhausted(i64),
    /// The token counter of the partition counts no more: it is missing, the store has lost data since
    /// it was written, or its epoch is used up. The driver takes an epoch from
    /// [`Epochs`](crate::epochs::Epochs), begins it on this very counter, and repeats the step.
    NeedsEpoch(BlankCounter),
    /// The counter has counted less far than `seen` says: it was copied back. With [`Seen::replace`],
    /// the store makes a blank one instead.
    Behind,
    /// The counter belongs to the source of epochs with this name.
    OtherSource(String),
}

/// A lease that a step has granted or renewed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Granted {
    /// Its token.
    pub token: Token,
    /// How long it lasts.
    pub ttl: Duration,
    /// How far the counter of the partition has counted: an epoch, and a number in it.
    pub counted: Option<(Epoch, i64)>,
}

impl Granted {
    /// A lease with this token, from a store that counts by itself.
    #[must_use]
    pub const fn new(token: Token, ttl: Duration) -> Self {
        Self {
            token,
            ttl,
            counted: None,
        }
    }

    /// Notes how far the counter of the partition has counted.
    #[must_use]
    pub const fn counted(mut self, epoch: Epoch, n: i64) -> Self {
        self.counted = Some((epoch, n));
        self
    }
}

/// A token counter that counts nothing until an epoch begins on it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlankCounter {
    /// The highest epoch that was ever begun on it, 0 for none. The new one is higher.
    pub epoch: i64,
    /// What the store tells this counter by from those before and after it.
    pub mark: String,
}

impl BlankCounter {
    /// A counter whose last epoch was this one.
    pub fn new(epoch: i64, mark: impl Into<String>) -> Self {
        Self {
            epoch,
            mark: mark.into(),
        }
    }
}

/// What this process knows of the token counter of a partition.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Seen<'a> {
    /// The source of its epochs. `None` if that was not needed yet: a step that needs no new token goes
    /// on without.
    pub source: Option<&'a SourceId>,
    /// The highest epoch that was seen, 0 for none.
    pub epoch: i64,
    /// The highest number that was seen in it.
    pub n: i64,
    /// Whether a counter below these is replaced by a blank one.
    pub replace: bool,
}

/// What this process knows of all token counters.
#[derive(Clone, Copy)]
pub struct Counters<'a>(Option<&'a KnownCounters>);

impl<'a> Counters<'a> {
    pub(super) const fn of(memory: Option<&'a KnownCounters>) -> Self {
        Self(memory)
    }

    /// What it knows of that of a resource's partition.
    #[must_use]
    pub fn seen(self, resource: &Resource) -> Seen<'a> {
        let Some(memory) = self.0 else {
            return Seen::default();
        };
        let (epoch, n) = memory.highest(partition_of(resource));
        Seen {
            source: memory.source(),
            epoch,
            n,
            replace: false,
        }
    }
}

impl fmt::Debug for Counters<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counters").finish_non_exhaustive()
    }
}
