//! Token counter of a partition. In its tokens, n is the number of etcd revisions since an epoch
//! began on the counter. Counting therefore needs no write to a key.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tower_fence::{
    epochs::Epoch,
    lease::backend::{BlankCounter, Seen},
};

use crate::{
    incarnation::{Log, StoredIncarnation},
    messages::{Header, KeyValue},
    stored::{FoundLease, value},
};

/// Value of a counter's key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StoredCounter {
    /// The source of the counter's epochs.
    pub(crate) source: String,
    /// The incarnation of etcd in which the counter was written; see [`StoredIncarnation`].
    pub(crate) incarnation: u64,
    /// A number that distinguishes the counter from every other counter that the partition has had.
    pub(crate) id: u64,
    /// The epoch. For a blank counter, the highest epoch that has ended.
    pub(crate) epoch: i64,
    /// Whether the epoch has begun. If not, the counter is blank.
    pub(crate) begun: bool,
}

/// Counter in whose epoch tokens are granted.
#[derive(Clone, Debug)]
pub(crate) struct Counter {
    pub(crate) epoch: Epoch,
    /// The revision in which the epoch began, from which the counter counts.
    pub(crate) base: i64,
    /// The value of the counter's key.
    pub(crate) value: Arc<[u8]>,
    /// The value of the key that stores the incarnation of etcd.
    pub(crate) incarnation: Arc<[u8]>,
}

impl Counter {
    /// Returns whether the token of the lease comes from this counter. If not, the lease was
    /// restored from a snapshot.
    pub(crate) fn granted(&self, lease: &FoundLease) -> bool {
        (lease.stored.epoch, lease.stored.base) == (self.epoch.get(), self.base)
    }

    /// Records in `seen` that the counter is higher by at least one, because this process has
    /// written to etcd. If etcd reports a lower count afterwards, a copy of its data folder was
    /// restored.
    pub(crate) fn note_write(&self, seen: &mut Seen<'_>) {
        if seen.epoch == self.epoch.get() {
            seen.n = seen.n.saturating_add(1);
        }
    }

    /// Returns the count of the counter in this revision.
    pub(crate) const fn counted(&self, revision: i64) -> i64 {
        revision.saturating_sub(self.base)
    }
}

/// Keys of a partition's counter and of the incarnation of etcd, in one response.
#[derive(Debug, Default)]
pub(crate) struct CounterView {
    pub(crate) header: Header,
    pub(crate) incarnation: Option<KeyValue>,
    pub(crate) counter: Option<KeyValue>,
    /// The length of the log after the response.
    pub(crate) log: Log,
}

/// State of a counter.
#[derive(Clone, Debug)]
pub(crate) enum CounterState {
    /// A counter on which an epoch has begun, and whose tokens are valid.
    Begun { counter: Counter, is_used_up: bool },
    /// A blank counter, on which an epoch may begin.
    Blank(BlankCounter),
    /// A counter that is no longer valid, or is missing. The next epoch is above this number.
    Over(i64),
    /// A counter that belongs to another source of epochs.
    OtherSource(String),
}

impl CounterView {
    /// Returns the stored incarnation of etcd, if the response comes from that incarnation.
    pub(crate) fn current_incarnation(&self) -> Option<StoredIncarnation> {
        let stored = self.incarnation.as_ref()?;
        let stored: Option<StoredIncarnation> = serde_json::from_slice(&stored.value.0).ok();
        stored.filter(|incarnation| incarnation.is_of(&self.header, self.log))
    }

    /// Evaluates the counter. `seen` is the highest state of the counter that this process had seen
    /// before the call.
    pub(crate) fn judge(&self, seen: &Seen<'_>) -> CounterState {
        let Some(kv) = &self.counter else {
            return CounterState::Over(seen.epoch);
        };
        let Ok(stored) = serde_json::from_slice::<StoredCounter>(&kv.value.0) else {
            return CounterState::Over(seen.epoch);
        };
        if seen
            .source
            .is_some_and(|source| source.as_str() != stored.source)
        {
            return CounterState::OtherSource(stored.source);
        }
        let over = CounterState::Over(stored.epoch.max(seen.epoch));
        if self
            .current_incarnation()
            .is_none_or(|incarnation| incarnation.id != stored.incarnation)
        {
            return over;
        }
        if !stored.begun {
            if stored.epoch < seen.epoch {
                return over;
            }
            let mark = mark(kv.mod_revision, &stored);
            return CounterState::Blank(BlankCounter::new(stored.epoch, mark));
        }
        let n = self.header.revision.saturating_sub(kv.mod_revision);
        match (Epoch::new(stored.epoch), &self.incarnation) {
            (Ok(epoch), Some(incarnation)) if (stored.epoch, n) >= (seen.epoch, seen.n) => {
                CounterState::Begun {
                    counter: Counter {
                        epoch,
                        base: kv.mod_revision,
                        value: kv.value.0.as_slice().into(),
                        incarnation: incarnation.value.0.as_slice().into(),
                    },
                    is_used_up: n >= Epoch::SIZE - 1,
                }
            }
            _ => over,
        }
    }

    /// Returns the counter, if its tokens are valid.
    pub(crate) fn valid(&self, seen: &Seen<'_>) -> Option<Counter> {
        match self.judge(seen) {
            CounterState::Begun { counter, .. } => Some(counter),
            _ => None,
        }
    }
}

/// Returns the mark of a blank counter, which is its value and the revision in which it was
/// written.
pub(crate) fn mark(revision: i64, blank: &StoredCounter) -> String {
    format!("{revision} {}", String::from_utf8_lossy(&value(blank)))
}

/// Parses the mark of a blank counter into its revision and its value.
pub(crate) fn read_mark(mark: &str) -> Option<(i64, StoredCounter)> {
    let (revision, blank) = mark.split_once(' ')?;
    Some((revision.parse().ok()?, serde_json::from_str(blank).ok()?))
}

#[cfg(test)]
mod tests {
    use tower_fence::epochs::SourceId;

    use super::*;
    use crate::messages::{Bytes, StatusAnswer};

    const INCARNATION: StoredIncarnation = StoredIncarnation {
        id: 3,
        cluster: 7,
        lead: Some(3),
    };

    fn counter() -> StoredCounter {
        StoredCounter {
            source: "ours".into(),
            incarnation: INCARNATION.id,
            id: 1,
            epoch: 5,
            begun: true,
        }
    }

    fn judge(
        incarnation: &StoredIncarnation,
        counter: &StoredCounter,
        revision: i64,
        seen: (i64, i64),
    ) -> CounterState {
        let header = Header {
            cluster_id: 7,
            member_id: 1,
            revision,
        };
        let kv = |bytes, mod_revision| KeyValue {
            value: Bytes(bytes),
            mod_revision,
            ..KeyValue::default()
        };
        // The length of the log is always 4 above the revision.
        let status = StatusAnswer {
            header,
            applied: revision + 4,
        };
        let view = CounterView {
            header,
            incarnation: Some(kv(value(incarnation), 70)),
            counter: Some(kv(value(counter), 80)),
            log: Log::read(&header, &status).unwrap(),
        };
        let source = SourceId::new("ours").unwrap();
        let mut known = Seen::default();
        known.source = Some(&source);
        (known.epoch, known.n) = seen;
        view.judge(&known)
    }

    #[test]
    fn counter_counts_only_in_its_own_incarnation() {
        let counts = |incarnation: &StoredIncarnation, counter: &StoredCounter, revision, seen| {
            matches!(
                judge(incarnation, counter, revision, seen),
                CounterState::Begun {
                    is_used_up: false,
                    ..
                }
            )
        };
        assert!(counts(&INCARNATION, &counter(), 100, (0, 0)));
        let earlier_incarnation = StoredCounter {
            incarnation: 2,
            ..counter()
        };
        let blank = StoredCounter {
            begun: false,
            ..counter()
        };
        for unusable in [&earlier_incarnation, &blank] {
            assert!(!counts(&INCARNATION, unusable, 100, (0, 0)), "{unusable:?}");
        }
        // The incarnation of etcd has ended.
        for over in [
            StoredIncarnation {
                cluster: 8,
                ..INCARNATION
            },
            StoredIncarnation {
                lead: Some(5),
                ..INCARNATION
            },
        ] {
            assert!(!counts(&over, &counter(), 100, (0, 0)), "{over:?}");
        }
        // The counter is valid if it is at least as high as the highest state that the process has
        // seen.
        assert!(counts(&INCARNATION, &counter(), 100, (5, 20)));
        for seen in [(5, 21), (6, 1)] {
            assert!(!counts(&INCARNATION, &counter(), 100, seen));
        }
        // The counter is valid until its epoch has no token left.
        assert!(counts(
            &INCARNATION,
            &counter(),
            80 + Epoch::SIZE - 2,
            (0, 0)
        ));
        assert!(!counts(
            &INCARNATION,
            &counter(),
            80 + Epoch::SIZE - 1,
            (0, 0)
        ));
    }

    #[test]
    fn epoch_begins_on_a_blank_counter_above_ended_epochs() {
        let needs = |counter: &StoredCounter, seen| match judge(&INCARNATION, counter, 100, seen) {
            CounterState::Blank(blank) => (blank.epoch, true),
            CounterState::Over(epoch) => (epoch, false),
            other => panic!("{other:?}"),
        };
        let blank = |epoch| StoredCounter {
            begun: false,
            epoch,
            ..counter()
        };
        assert_eq!(needs(&blank(0), (0, 0)), (0, true));
        assert_eq!(needs(&blank(5), (5, 1)), (5, true));
        assert_eq!(needs(&blank(5), (9, 1)), (9, false));
        let earlier_incarnation = StoredCounter {
            incarnation: 2,
            ..blank(5)
        };
        assert_eq!(needs(&earlier_incarnation, (0, 0)), (5, false));
        assert_eq!(needs(&counter(), (9, 1)), (9, false));
        let theirs = StoredCounter {
            source: "theirs".into(),
            ..counter()
        };
        assert!(matches!(
            judge(&INCARNATION, &theirs, 100, (0, 0)),
            CounterState::OtherSource(_)
        ));
        let (revision, stored) = read_mark(&mark(80, &blank(5))).unwrap();
        assert_eq!((revision, value(&stored)), (80, value(&blank(5))));
    }
}
