//! The line of one resource, as its watch tells it: who is first, and whether it is their turn.

use std::collections::{BTreeMap, HashMap};

use super::messages::{Event, KeyValue};

/// A line. What two watches tell may come in any order, so for a moment it may be wrong; whoever is told of a turn
/// asks.
#[derive(Debug, Default)]
pub(super) struct Line {
    is_closed: bool,
    /// The stored ids of those who wait, by the revision since which they do.
    places: BTreeMap<i64, String>,
    since: HashMap<String, i64>,
}

impl Line {
    /// The line as it was read.
    pub(super) fn read(is_closed: bool, places: &[KeyValue], prefix: &str) -> Self {
        let mut line = Self {
            is_closed,
            ..Self::default()
        };
        for place in places {
            if let Some(id) = id_of(place, prefix) {
                line.enter(id, place.create_revision);
            }
        }
        line
    }

    /// Takes in what has happened to the lease's key, or to a place: those begin with `prefix`. Returns who has lost
    /// a place.
    pub(super) fn apply(&mut self, event: &Event, prefix: &str) -> Option<String> {
        let is_gone = event.kind == "DELETE";
        let Some(id) = id_of(&event.kv, prefix) else {
            self.is_closed = !is_gone;
            return None;
        };
        if is_gone {
            let since = self.since.remove(&id)?;
            self.places.remove(&since);
            return Some(id);
        }
        self.enter(id, event.kv.create_revision);
        None
    }

    /// Whose turn it is.
    pub(super) fn turn(&self) -> Option<&str> {
        let (_, first) = self.places.first_key_value()?;
        (!self.is_closed).then_some(first)
    }

    /// Whether somebody is in line.
    pub(super) fn has(&self, id: &str) -> bool {
        self.since.contains_key(id)
    }

    fn enter(&mut self, id: String, since: i64) {
        if let Some(before) = self.since.insert(id.clone(), since) {
            self.places.remove(&before);
        }
        self.places.insert(since, id);
    }
}

fn id_of(kv: &KeyValue, prefix: &str) -> Option<String> {
    let key = str::from_utf8(&kv.key.0).ok()?;
    key.strip_prefix(prefix).map(ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::{super::messages::Bytes, *};

    fn event(kind: &str, key: &str, create_revision: i64) -> Event {
        Event {
            kind: kind.into(),
            kv: KeyValue {
                key: Bytes(key.into()),
                create_revision,
                ..KeyValue::default()
            },
        }
    }

    #[test]
    fn the_first_one_has_the_turn_as_soon_as_the_lease_is_gone() {
        let mut line = Line::read(true, &[], "line\0");
        let mut apply = |event| {
            let lost = line.apply(&event, "line\0");
            (lost, line.turn().map(ToOwned::to_owned))
        };
        let (turn, nobody) = (|id: &str| Some(id.to_owned()), None::<String>);
        assert_eq!(apply(event("", "line\0#b", 7)), (None, None));
        assert_eq!(apply(event("", "line\0#a", 8)), (None, None));
        assert_eq!(apply(event("DELETE", "lease", 0)), (None, turn("#b")));
        // A place that is written again keeps its revision.
        assert_eq!(apply(event("", "line\0#a", 8)), (None, turn("#b")));
        assert_eq!(
            apply(event("DELETE", "line\0#b", 0)),
            (turn("#b"), turn("#a"))
        );
        assert_eq!(apply(event("", "lease", 9)), (None, nobody.clone()));
        assert_eq!(apply(event("DELETE", "line\0#x", 0)), (None, nobody));
        assert!(line.has("#a") && !line.has("#b"));
    }
}
