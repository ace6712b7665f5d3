//! The phase of a connection, which determines its timeout, and whether another connection may
//! replace it.

use std::{
    sync::{Mutex, MutexGuard, PoisonError, atomic::AtomicUsize},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

/// The age at which an incomplete head of a request counts as slow.
const SLOW_HEAD: Duration = Duration::from_secs(1);

/// The phase of a connection, and when the phase began.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// It has sent nothing except for a TLS handshake.
    Silent(Instant),
    /// It has sent a part of the head of a request.
    Head(Instant),
    /// A request is being answered.
    Request,
    /// The response is being sent. Its body may still produce data.
    Sending(Instant),
    /// The rest of the response is in a buffer.
    Flushing(Instant),
    /// Its last request is answered.
    Idle(Instant),
}

/// The state that a connection shares with the server.
pub(super) struct State {
    phase: Mutex<Phase>,
    /// The number of bodies of requests that are not read to their end.
    pub(super) unread: AtomicUsize,
    /// Notified when the last of them has been read or dropped after its response.
    pub(super) drained: Notify,
    /// Notified when another connection replaces this one.
    pub(super) replaced: Notify,
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            phase: Mutex::new(Phase::Silent(Instant::now())),
            unread: AtomicUsize::new(0),
            drained: Notify::new(),
            replaced: Notify::new(),
        }
    }

    /// Closes the connection, unless a request arrives at the same moment.
    pub(super) fn replace(&self) {
        self.replaced.notify_one();
    }

    pub(super) fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rank for replacement; `None` if the connection must not be replaced. The
    /// connection with the smallest rank is replaced first.
    pub(super) fn rank(&self, now: Instant) -> Option<(u8, Instant)> {
        match *self.phase() {
            Phase::Silent(since) => Some((0, since)),
            Phase::Head(since) if now - since >= SLOW_HEAD => Some((1, since)),
            Phase::Idle(since) => Some((2, since)),
            Phase::Head(_) | Phase::Request | Phase::Sending(_) | Phase::Flushing(_) => None,
        }
    }

    pub(super) fn has_request(&self) -> bool {
        matches!(
            *self.phase(),
            Phase::Request | Phase::Sending(_) | Phase::Flushing(_)
        )
    }
}
