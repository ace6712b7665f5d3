//! Queue of one resource, as its watches report it: which request is the first, and whether it is
//! its turn.

use std::{collections::HashMap, mem};

use crate::messages::{Event, KeyValue};
use crate::stored::FoundPosition;

/// Queue of one resource. Its two watches report in any order, so this state may be wrong for a
/// moment. If a waiter is notified too early, it reads the resource from etcd, and stays in the
/// queue.
#[derive(Debug, Default)]
pub(crate) struct WatchedQueue {
    is_blocked: bool,
    /// The revision in which each request joined, and its ticket, by the key of its position.
    waiters: HashMap<Vec<u8>, (i64, i64)>,
}

impl WatchedQueue {
    /// Replaces the queue with the state that was read. Returns the tickets of the requests that
    /// have lost their positions.
    pub(crate) fn read(&mut self, is_blocked: bool, positions: &[KeyValue]) -> Vec<i64> {
        self.is_blocked = is_blocked;
        let waiters = positions.iter().map(|kv| (kv.key.0.clone(), waiter(kv)));
        let mut before = mem::replace(&mut self.waiters, waiters.collect());
        before.retain(|key, waiter| self.waiters.get(key) != Some(waiter));
        before.into_values().map(|(_, ticket)| ticket).collect()
    }

    /// Applies an event of the key of the lease or of a position. Returns the ticket of a request
    /// that has lost its position.
    pub(crate) fn apply(&mut self, event: &Event, lease: &[u8]) -> Option<i64> {
        let (key, is_deleted) = (&event.kv.key.0, event.kind == "DELETE");
        if key == lease {
            self.is_blocked = !is_deleted;
            return None;
        }
        if is_deleted {
            return self.waiters.remove(key).map(|(_, ticket)| ticket);
        }
        let now = waiter(&event.kv);
        let before = self.waiters.insert(key.clone(), now);
        before
            .filter(|before| *before != now)
            .map(|(_, ticket)| ticket)
    }

    /// Returns the ticket of the request whose turn it is.
    pub(crate) fn turn(&self) -> Option<i64> {
        let first = self.waiters.values().min();
        first
            .filter(|_| !self.is_blocked)
            .map(|(_, ticket)| *ticket)
    }
}

fn waiter(kv: &KeyValue) -> (i64, i64) {
    let position = FoundPosition::read(kv);
    (position.since, position.stored.ticket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        messages::Bytes,
        stored::{StoredPosition, value},
    };

    fn kv(key: &str, since: i64, ticket: i64) -> KeyValue {
        let stored = StoredPosition {
            ticket,
            owner: None,
        };
        KeyValue {
            key: Bytes(key.into()),
            value: Bytes(value(&stored)),
            create_revision: since,
            ..KeyValue::default()
        }
    }

    fn put(key: &str, since: i64, ticket: i64) -> Event {
        Event {
            kind: String::new(),
            kv: kv(key, since, ticket),
        }
    }

    fn deleted(key: &str) -> Event {
        Event {
            kind: "DELETE".into(),
            kv: kv(key, 0, 0),
        }
    }

    #[test]
    fn first_waiter_is_served_when_the_lease_is_gone() {
        let mut queue = WatchedQueue::default();
        assert!(queue.read(true, &[]).is_empty());
        let mut apply = |event| (queue.apply(&event, b"lease"), queue.turn());
        assert_eq!(apply(put("b", 7, 70)), (None, None));
        assert_eq!(apply(put("a", 8, 80)), (None, None));
        assert_eq!(apply(deleted("lease")), (None, Some(70)));
        // A repeated request takes over the position.
        assert_eq!(apply(put("b", 7, 71)), (Some(70), Some(71)));
        assert_eq!(apply(deleted("b")), (Some(71), Some(80)));
        assert_eq!(apply(put("lease", 9, 0)), (None, None));
        assert_eq!(apply(deleted("x")), (None, None));
        // A new read shows which positions were lost in the meantime.
        assert_eq!(queue.read(false, &[kv("c", 12, 120)]), [80]);
        assert_eq!(queue.turn(), Some(120));
    }
}
