//! Limits the number of pages that follow the feed at the same time.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// The duration of a stream.
pub(super) const STREAM_LIMIT: Duration = Duration::from_secs(10);
/// The maximum number of streams.
const LIMIT: usize = 32;

/// The permits of the readers. A permit expires after the maximum duration of a stream, even if the
/// client does not read the stream, so a stalled connection cannot occupy it for longer.
#[derive(Debug, Default)]
pub(super) struct Readers(Mutex<Permits>);

#[derive(Debug, Default)]
struct Permits {
    last: u64,
    taken: Vec<(u64, Instant)>,
}

/// A permit for one reader, until it is dropped or expires.
pub(super) struct Permit {
    readers: Arc<Readers>,
    number: u64,
    pub(super) until: Instant,
}

impl Readers {
    /// Returns a permit, if one is free.
    pub(super) fn take(self: &Arc<Self>) -> Option<Permit> {
        let now = Instant::now();
        let mut permits = self.permits();
        permits.taken.retain(|(_, until)| *until > now);
        if permits.taken.len() == LIMIT {
            return None;
        }
        permits.last += 1;
        let (number, until) = (permits.last, now + STREAM_LIMIT);
        permits.taken.push((number, until));
        Some(Permit {
            readers: Arc::clone(self),
            number,
            until,
        })
    }

    fn permits(&self) -> MutexGuard<'_, Permits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut permits = self.readers.permits();
        permits.taken.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn reader_slots_are_bounded_and_freed_on_drop_or_timeout() {
        let readers = Arc::new(Readers::default());
        let mut taken: Vec<_> = (0..LIMIT).map(|_| readers.take().unwrap()).collect();
        assert!(readers.take().is_none());
        taken.pop();
        let next = readers.take().unwrap();
        assert!(readers.take().is_none());
        // The permits are not dropped, as if their connections had stalled.
        tokio::time::advance(STREAM_LIMIT).await;
        let after: Vec<_> = (0..LIMIT).map(|_| readers.take().unwrap()).collect();
        drop((taken, next));
        assert!(readers.take().is_none());
        drop(after);
        assert!(readers.take().is_some());
    }
}
