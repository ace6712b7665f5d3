//! The phase of a connection, which determines its timeout, and whether another connection may
//! replace it.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

/// The age at which an incomplete request counts as slow.
const SLOW_REQUEST: Duration = Duration::from_secs(1);

/// The time without progress after which a client that does not read counts as stalled.
const STALLED: Duration = Duration::from_secs(3);

/// The phase of a connection, and when the phase began.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// It has sent nothing except for a TLS handshake.
    Silent(Instant),
    /// It has sent a part of the head of a request.
    Head(Instant),
    /// A request is being answered, although its body may not have arrived.
    Request(Instant),
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
    /// When the socket refused bytes, if it has accepted none since then.
    blocked: Mutex<Option<Instant>>,
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
            blocked: Mutex::default(),
            unread: AtomicUsize::new(0),
            drained: Notify::new(),
            replaced: Notify::new(),
        }
    }

    /// Closes the connection, unless a request arrives, or the client reads, at the same moment.
    pub(super) fn replace(&self) {
        self.replaced.notify_one();
    }

    pub(super) fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the client has sent these bytes.
    pub(super) fn read(&self, bytes: &[u8]) {
        let mut phase = self.phase();
        if !bytes.is_empty() && matches!(*phase, Phase::Silent(_) | Phase::Idle(_)) {
            *phase = Phase::Head(Instant::now());
        }
    }

    /// Records that the socket refused bytes.
    pub(super) fn refused_bytes(&self) {
        self.blocked().get_or_insert_with(Instant::now);
    }

    /// Records that the socket accepted bytes.
    pub(super) fn accepted_bytes(&self) {
        *self.blocked() = None;
    }

    /// Returns when the socket refused bytes, if it has accepted none since then.
    pub(super) fn blocked_since(&self) -> Option<Instant> {
        *self.blocked()
    }

    fn blocked(&self) -> MutexGuard<'_, Option<Instant>> {
        self.blocked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rank for replacement; `None` if the connection must not be replaced. The
    /// connection with the smallest rank is replaced first.
    ///
    /// A stalled connection has a rank even if a request is in progress, because a client can
    /// pipeline a request that waits behind a response that it does not read.
    pub(super) fn rank(&self, now: Instant) -> Option<(u8, Instant)> {
        match *self.phase() {
            // A client that has just connected may be in its TLS handshake.
            Phase::Silent(since) if now - since < SLOW_REQUEST => Some((4, since)),
            Phase::Silent(since) => Some((0, since)),
            Phase::Head(since) => (now - since >= SLOW_REQUEST).then_some((1, since)),
            // Each route reads the whole body before it has an effect, so this request has
            // had no effect.
            Phase::Request(since)
                if self.unread.load(SeqCst) > 0 && now - since >= SLOW_REQUEST =>
            {
                Some((1, since))
            }
            Phase::Idle(since) => Some((2, since)),
            Phase::Request(_) | Phase::Sending(_) | Phase::Flushing(_) => {
                let since = self.blocked_since()?;
                (now - since >= STALLED).then_some((3, since))
            }
        }
    }

    pub(super) fn has_request(&self) -> bool {
        matches!(
            *self.phase(),
            Phase::Request(_) | Phase::Sending(_) | Phase::Flushing(_)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalled_connection_is_replaced_after_an_idle_one() {
        let state = State::new();
        let rank = |after: Duration| state.rank(Instant::now() + after).map(|(rank, _)| rank);
        // It may be in its TLS handshake.
        assert_eq!(rank(Duration::ZERO), Some(4));
        assert_eq!(rank(SLOW_REQUEST), Some(0));
        for phase in [
            Phase::Request(Instant::now()),
            Phase::Sending(Instant::now()),
            Phase::Flushing(Instant::now()),
        ] {
            *state.phase() = phase;
            assert_eq!(rank(60 * STALLED), None);
            state.refused_bytes();
            assert_eq!(rank(STALLED), Some(3));
            // A slow client that reads is not stalled.
            state.accepted_bytes();
            assert_eq!(rank(60 * STALLED), None);
        }
        state.refused_bytes();
        *state.phase() = Phase::Idle(Instant::now());
        assert_eq!(rank(Duration::ZERO), Some(2));
    }
}
