//! The recent events of leases and of writes, and the number of events in each recent second.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use tower_fence::events::TARGET;
use tracing::{Subscriber, subscriber::Interest};
use tracing_subscriber::{Layer, filter::dynamic_filter_fn, layer::Context, registry::LookupSpan};

use crate::event::{Event, KINDS, What};

/// The maximum number of stored events of each kind: lease events and write events.
const RING: usize = 512;
/// The maximum number of events of each kind in a batch. If there are more, the reader misses the
/// oldest ones.
const READ_MOST: usize = 128;
/// The number of seconds for which counts are kept.
pub(crate) const SECONDS: u64 = 300;

/// A second since the feed began, and the number of events of each kind in it.
pub(crate) type Counts = (u64, [u32; KINDS.len()]);

/// The recent events of this process, from [`tower_fence::events`]. Clones are cheap and share the
/// events.
///
/// Each event is stored in a ring buffer of fixed length, without waking readers. A writer holds
/// the lock only while it moves one event, and a reader only while it clones at most 256 events.
#[derive(Clone, Debug, Default)]
pub struct Events(Arc<Feed>);

impl Events {
    /// Creates an empty list of events.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the layer that collects the events. Add it to the subscriber of the process. If the
    /// subscriber also has a layer for the log, that layer needs its own filter:
    ///
    /// ```
    /// use tower_fence_console::Events;
    /// use tracing_subscriber::prelude::*;
    ///
    /// let events = Events::new();
    /// // let log = tracing_subscriber::fmt::layer().with_filter(EnvFilter::from_default_env());
    /// let subscriber = tracing_subscriber::registry().with(events.layer()); // .with(log)
    /// # drop(subscriber);
    /// ```
    pub fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        // The interest must depend on each event. If it were "always", an unrelated check of the
        // facade `log` on the same thread could make the filters of all layers skip an event.
        let is_event =
            dynamic_filter_fn(|of, _| of.target() == TARGET).with_callsite_filter(|of| {
                match of.target() == TARGET {
                    true => Interest::sometimes(),
                    false => Interest::never(),
                }
            });
        Collector(self.clone()).with_filter(is_event)
    }

    pub(crate) fn feed(&self) -> &Feed {
        &self.0
    }
}

/// The layer of [`Events`] without its filter.
struct Collector(Events);

impl<S: Subscriber> Layer<S> for Collector {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if let Some(what) = What::read(event) {
            self.0.feed().push(what);
        }
    }
}

/// Returns the milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
    since_1970.unwrap_or_default().as_millis() as u64
}

#[derive(Debug)]
pub(crate) struct Feed {
    /// Distinguishes this feed from the feed of another process.
    pub(crate) id: u64,
    began: Instant,
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    last_id: u64,
    of_leases: VecDeque<Event>,
    of_writes: VecDeque<Event>,
    seconds: VecDeque<Counts>,
}

/// The events that are new to a reader.
pub(crate) struct Batch {
    pub(crate) events: Vec<Event>,
    /// The number of events that the reader has missed.
    pub(crate) missed: u64,
    /// The id of the last event. The next batch starts after it.
    pub(crate) last_id: u64,
    pub(crate) seconds: Vec<Counts>,
}

impl Default for Feed {
    fn default() -> Self {
        Self {
            // 52 bits: a JavaScript number represents them exactly.
            id: rand::random::<u64>() >> 12,
            began: Instant::now(),
            kept: Mutex::new(Kept {
                last_id: 0,
                of_leases: VecDeque::with_capacity(RING),
                of_writes: VecDeque::with_capacity(RING),
                seconds: VecDeque::with_capacity(SECONDS as usize + 1),
            }),
        }
    }
}

impl Feed {
    /// Returns the number of seconds since the feed began, by a monotonic clock.
    pub(crate) fn second(&self) -> u64 {
        self.began.elapsed().as_secs()
    }

    /// Adds an event.
    pub(crate) fn push(&self, what: What) {
        // The evicted event is dropped after the lock is released.
        let _oldest = self.kept().push(what, self.second());
    }

    /// Returns the id of the last event.
    pub(crate) fn last_id(&self) -> u64 {
        self.kept().last_id
    }

    /// Returns the events after `id` (without an id, the most recent ones) and the counts from
    /// `from_second` on.
    pub(crate) fn after(&self, id: Option<u64>, from_second: u64) -> Batch {
        let kept = self.kept();
        let from = id.unwrap_or(0).min(kept.last_id);
        let mut events = Vec::with_capacity(2 * READ_MOST);
        for ring in [&kept.of_leases, &kept.of_writes] {
            let new = ring.iter().rev().take_while(|event| event.id > from);
            events.extend(new.take(READ_MOST).cloned());
        }
        events.sort_unstable_by_key(|event| event.id);
        let seconds = kept.seconds.iter().filter(|(at, _)| *at >= from_second);
        let (seconds, last_id) = (seconds.copied().collect(), kept.last_id);
        drop(kept);
        let new = id.map_or(events.len() as u64, |_| last_id - from);
        Batch {
            missed: new - events.len() as u64,
            events,
            last_id,
            seconds,
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // The lock cannot be poisoned: no code panics while it holds the lock.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// Adds an event, and returns the evicted one.
    fn push(&mut self, what: What, second: u64) -> Option<Event> {
        self.count(what.kind, second);
        self.last_id += 1;
        let ring = if what.is_of_lease() {
            &mut self.of_leases
        } else {
            &mut self.of_writes
        };
        let oldest = if ring.len() == RING {
            ring.pop_front()
        } else {
            None
        };
        ring.push_back(Event {
            id: self.last_id,
            at_ms: now_ms(),
            what,
        });
        oldest
    }

    fn count(&mut self, kind: usize, now: u64) {
        // Another thread may have read a later second, and taken the lock first.
        let now = match self.seconds.back() {
            Some((last, _)) => now.max(*last),
            None => now,
        };
        while self
            .seconds
            .front()
            .is_some_and(|(at, _)| at + SECONDS <= now)
        {
            self.seconds.pop_front();
        }
        match self.seconds.back_mut() {
            Some((at, counts)) if *at == now => counts[kind] = counts[kind].saturating_add(1),
            _ => {
                let mut counts = [0; KINDS.len()];
                counts[kind] = 1;
                self.seconds.push_back((now, counts));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: &str) -> What {
        What {
            kind: KINDS.iter().position(|&known| known == kind).unwrap(),
            fields: Default::default(),
        }
    }

    fn write() -> What {
        event("admitted")
    }

    fn grant() -> What {
        event("granted")
    }

    fn ids(batch: &Batch) -> Vec<u64> {
        batch.events.iter().map(|event| event.id).collect()
    }

    #[test]
    fn reader_receives_new_grants_and_writes_in_order() {
        let feed = Feed::default();
        for _ in 0..3 {
            feed.push(grant());
            feed.push(write());
        }
        let first = feed.after(None, 0);
        assert_eq!((ids(&first), first.missed), ((1..=6).collect(), 0));
        feed.push(write());
        let next = feed.after(Some(first.last_id), 0);
        assert_eq!((ids(&next), next.missed), (vec![7], 0));
        // An id that is higher than all ids of this feed counts as the last one.
        assert_eq!(feed.after(Some(1_000), 0).events.len(), 0);
    }

    #[test]
    fn late_reader_learns_how_many_events_it_missed() {
        let feed = Feed::default();
        feed.push(write());
        let last_id = feed.after(None, 0).last_id;
        for _ in 0..10_000 {
            feed.push(write());
        }
        let late = feed.after(Some(last_id), 0);
        assert_eq!(late.events.len(), READ_MOST);
        assert_eq!(late.missed, 10_000 - READ_MOST as u64);
        assert_eq!(late.last_id, 10_001);
    }

    #[test]
    fn write_events_evict_no_grants_and_memory_is_bounded() {
        let feed = Feed::default();
        feed.push(grant());
        for _ in 0..100_000 {
            feed.push(write());
        }
        assert_eq!(ids(&feed.after(None, 0))[0], 1, "the grant is shown");
        let kept = feed.kept();
        assert_eq!((kept.of_leases.len(), kept.of_writes.len()), (1, RING));
        assert_eq!(kept.of_writes.capacity(), RING);
    }

    #[test]
    fn events_are_counted_per_second_for_a_few_minutes() {
        let feed = Feed::default();
        let mut kept = feed.kept();
        let start = 1_000_000;
        for second in 0..SECONDS + 10 {
            for _ in 0..3 {
                kept.push(write(), start + second);
            }
        }
        // This event has an earlier second, but is pushed later.
        kept.push(grant(), start);
        assert_eq!(kept.seconds.len() as u64, SECONDS);
        let (last, counts) = kept.seconds.back().unwrap();
        assert_eq!(*last, start + SECONDS + 9);
        assert_eq!(counts[write().kind], 3);
        assert_eq!(counts[grant().kind], 1);
        drop(kept);
        assert_eq!(feed.after(None, start + SECONDS + 8).seconds.len(), 2);
    }
}
