//! How many pages follow the feed at a time.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// How long a stream lasts.
pub(super) const STREAM_LIMIT: Duration = Duration::from_secs(10);
/// How many there may be.
const LIMIT: usize = 32;

/// The places of the readers. Each lasts as long as the reader's stream may, whether anybody takes what is sent or not:
/// a connection that stalls keeps nobody out for longer.
#[derive(Debug, Default)]
pub(super) struct Readers(Mutex<Places>);

#[derive(Debug, Default)]
struct Places {
    last: u64,
    taken: Vec<(u64, Instant)>,
}

/// A place, until it is dropped or its time is over.
pub(super) struct Place {
    readers: Arc<Readers>,
    number: u64,
    pub(super) until: Instant,
}

impl Readers {
    /// Takes a place, if one is free.
    pub(super) fn take(self: &Arc<Self>, time: Duration) -> Option<Place> {
        let now = Instant::now();
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        places.taken.retain(|(_, until)| *until > now);
        if places.taken.len() == LIMIT {
            return None;
        }
        places.last += 1;
        let (number, until) = (places.last, now + time);
        places.taken.push((number, until));
        Some(Place {
            readers: Arc::clone(self),
            number,
            until,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let places = &self.readers.0;
        let mut places = places.lock().unwrap_or_else(PoisonError::into_inner);
        places.taken.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn places_are_few_and_come_free_by_their_end_or_by_their_time() {
        let (readers, time) = (Arc::new(Readers::default()), Duration::from_secs(15));
        let mut taken: Vec<_> = (0..LIMIT).map(|_| readers.take(time).unwrap()).collect();
        assert!(readers.take(time).is_none());
        taken.pop();
        let next = readers.take(time).unwrap();
        assert!(readers.take(time).is_none());
        // Nobody drops them, as where a connection stalls.
        tokio::time::advance(time).await;
        let after: Vec<_> = (0..LIMIT).map(|_| readers.take(time).unwrap()).collect();
        drop((taken, next));
        assert!(readers.take(time).is_none());
        drop(after);
        assert!(readers.take(time).is_some());
    }
}
