//! The events of the console: their JSON form, and their conversion from `tracing` events.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;
use serde_json::Value;
use tracing::field::{Field, Visit};

/// An event with its time.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Event {
    /// The number of the event. It increases by one with each event of any kind.
    pub(crate) id: u64,
    /// Milliseconds since 1970.
    pub(crate) at_ms: u64,
    #[serde(flatten)]
    pub(crate) what: What,
}

/// The content of an event. See [`tower_fence::events`].
#[derive(Clone, Debug, Serialize)]
pub(crate) struct What {
    /// The position of the event's kind in [`KINDS`].
    #[serde(skip)]
    pub(crate) kind: usize,
    #[serde(flatten)]
    pub(crate) fields: Fields,
}

/// The kinds, in the order of their counters: those of writes, then those of leases.
pub(crate) const KINDS: [&str; 10] = [
    "admitted",
    "stale",
    "forged",
    "refused",
    "waiting",
    "granted",
    "released",
    "lost",
    "broken",
    "superseded",
];

/// The position of the first kind of lease events, which is `waiting`.
const FIRST_OF_LEASES: usize = 4;

/// The fields of events that the page shows, in addition to the kind. None of them contains a lease
/// id.
const SHOWN: [&str; 10] = [
    "resource",
    "token",
    "next",
    "max_token",
    "owner",
    "problem",
    "waited_ms",
    "read",
    "used",
    "by_floor",
];

impl What {
    /// Returns the event that a `tracing` event describes, or `None` if its kind is unknown, for
    /// example because a later version of the library has emitted it.
    pub(crate) fn read(event: &tracing::Event<'_>) -> Option<Self> {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let kind = fields.0.get("kind")?.as_str()?;
        let kind = KINDS.iter().position(|&known| known == kind)?;
        Some(Self { kind, fields })
    }

    /// Returns whether the event concerns a lease. Such events have their own ring buffer, so that
    /// a burst of writes does not evict them.
    pub(crate) const fn is_of_lease(&self) -> bool {
        self.kind >= FIRST_OF_LEASES
    }
}

/// The members of an event's JSON object.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Fields(BTreeMap<&'static str, Value>);

impl Fields {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        let name = match field.name() {
            "event" => "kind",
            name if SHOWN.contains(&name) => name,
            _ => return,
        };
        self.0.insert(name, value.into());
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tower_fence::events::TARGET;
    use tracing::trace;
    use tracing_subscriber::prelude::*;

    #[test]
    fn only_listed_fields_of_known_events_are_shown() {
        let events = crate::Events::new();
        let subscriber = tracing_subscriber::registry().with(events.layer());
        tracing::subscriber::with_default(subscriber, || {
            trace!(target: TARGET, event = "later", resource = "sku-1");
            trace!(target: TARGET, event = "lost", resource = %"\"<b>", lease_id = "secret");
        });
        let mut shown = serde_json::to_value(events.feed().after(None, 0).events).unwrap();
        shown[0]["at_ms"] = json!(0);
        let lost = json!({"id": 1, "at_ms": 0, "kind": "lost", "resource": "\"<b>"});
        assert_eq!(shown, json!([lost]));
    }
}
