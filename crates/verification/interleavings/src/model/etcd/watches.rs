//! The streams of watches that are open, and everything that was ever written.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
};

use serde_json::Value;
use shuttle::rand::{Rng, thread_rng};

use super::{super::sync::mpsc, Bytes, bytes, number};

#[derive(Default)]
pub struct Watches {
    told: Vec<(Bytes, i64, Value)>,
    begun: u64,
    streams: BTreeMap<u64, Vec<Watch>>,
}

/// One of the watches of a stream.
struct Watch {
    range: Range<Bytes>,
    events: mpsc::UnboundedSender<Value>,
}

/// What the watches of a stream tell, each in its order.
pub struct Told(Vec<mpsc::UnboundedReceiver<Value>>);

impl Watches {
    /// Opens a stream of these watches. Each begins with what was written in its first revision or later.
    pub fn open(&mut self, requests: &[Value]) -> (u64, Told) {
        self.begun += 1;
        let mut told = Told(vec![]);
        let mut watches = vec![];
        for request in requests.iter().map(|request| &request["create_request"]) {
            let (events, receiver) = mpsc::unbounded_channel();
            let first = bytes(&request["key"]);
            let end = match &request["range_end"] {
                Value::Null => [first.as_slice(), b"\0"].concat(),
                end => bytes(end),
            };
            let (range, since) = (first..end, number(&request["start_revision"]));
            let missed = self.told.iter().filter(|(key, revision, _)| {
                since > 0 && *revision >= since && range.contains(key)
            });
            for (_, _, event) in missed {
                let _ = events.send_at_once(event.clone());
            }
            watches.push(Watch { range, events });
            told.0.push(receiver);
        }
        self.streams.insert(self.begun, watches);
        (self.begun, told)
    }

    pub fn is_open(&self, stream: u64) -> bool {
        self.streams.contains_key(&stream)
    }

    pub fn close(&mut self, stream: u64) {
        self.streams.remove(&stream);
    }

    pub fn cut(&mut self) {
        self.streams.retain(|_, _| thread_rng().gen_bool(0.5));
    }

    pub fn tell(&mut self, key: &Bytes, revision: i64, event: Value) {
        for watch in self.streams.values().flatten() {
            if watch.range.contains(key) {
                let _ = watch.events.send_at_once(event.clone());
            }
        }
        self.told.push((key.clone(), revision, event));
    }
}

impl Told {
    /// The next event of one of them; nothing where the stream is cut.
    pub async fn next(&mut self) -> Option<Value> {
        let at = thread_rng().gen_range(0..self.0.len());
        self.0.rotate_left(at);
        let [one, other] = self.0.as_mut_slice() else {
            panic!("two watches");
        };
        tokio::select! {
            biased;
            event = one.recv() => event,
            event = other.recv() => event,
        }
    }
}
