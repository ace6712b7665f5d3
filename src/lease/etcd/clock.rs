//! The clock of a partition, and what it is good for.

use serde::{Deserialize, Serialize};

use super::{
    life::Log,
    messages::{Header, KeyValue},
};
use crate::epochs::{Epoch, SourceId};

/// The value of a clock's key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StoredClock {
    /// Whose epochs these are.
    pub(super) source: String,
    /// The id of the cluster.
    pub(super) history: u64,
    /// What tells it from every other clock that ever stood here.
    pub(super) incarnation: u64,
    /// A lead that its life had reached when it was begun.
    pub(super) lead: Option<i64>,
    /// The epoch; of a blank clock, one that is over.
    pub(super) epoch: i64,
    pub(super) begun: bool,
}

/// A clock that has tokens to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Clock {
    pub(super) epoch: Epoch,
    /// The revision in which it was begun, from which it counts.
    pub(super) base: i64,
}

/// What a clock is good for.
#[derive(Clone, Debug)]
pub(super) enum ClockState {
    Usable(Clock),
    /// It grants nothing until an epoch is begun.
    NeedsEpoch(UnusableClock),
    /// It belongs to another source of epochs.
    OtherSource(String),
}

#[derive(Clone, Debug)]
pub(super) struct UnusableClock {
    /// When it was written; 0 where there is none.
    pub(super) revision: i64,
    /// The epoch that is known to be over.
    pub(super) epoch: i64,
    /// The clock itself, where it is blank and an epoch may be begun on it.
    pub(super) blank: Option<StoredClock>,
}

impl ClockState {
    /// Judges a clock, as an answer with this header has brought it. `seen` is the epoch and number that this process
    /// had seen before it asked.
    pub(super) fn judge(
        found: Option<&KeyValue>,
        header: &Header,
        log: Log,
        seen: (i64, i64),
        source: Option<&SourceId>,
    ) -> Self {
        let revision = found.map_or(0, |kv| kv.mod_revision);
        let needs = |epoch: i64, blank| {
            let epoch = epoch.max(seen.0);
            Self::NeedsEpoch(UnusableClock {
                revision,
                epoch,
                blank,
            })
        };
        let clock = found.and_then(|kv| serde_json::from_slice::<StoredClock>(&kv.value.0).ok());
        let Some(clock) = clock else {
            return needs(0, None);
        };
        if source.is_some_and(|source| source.as_str() != clock.source) {
            return Self::OtherSource(clock.source);
        }
        let own =
            clock.history == header.cluster_id && !log.is_later_than(clock.lead, header.revision);
        let n = header.revision.saturating_sub(revision);
        match Epoch::new(clock.epoch) {
            Ok(epoch) if own && clock.begun && (clock.epoch, n) >= seen && n < Epoch::SIZE - 1 => {
                Self::Usable(Clock {
                    epoch,
                    base: revision,
                })
            }
            _ if own && !clock.begun && clock.epoch >= seen.0 => needs(clock.epoch, Some(clock)),
            _ => needs(clock.epoch, None),
        }
    }

    pub(super) const fn usable(&self) -> Option<Clock> {
        match self {
            Self::Usable(clock) => Some(*clock),
            Self::NeedsEpoch(_) | Self::OtherSource(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            messages::{Bytes, StatusAnswer},
            stored::value,
        },
        *,
    };

    fn clock() -> StoredClock {
        StoredClock {
            source: "ours".into(),
            history: 7,
            incarnation: 1,
            lead: Some(3),
            epoch: 5,
            begun: true,
        }
    }

    fn judge(clock: &StoredClock, revision: i64, seen: (i64, i64)) -> ClockState {
        let kv = KeyValue {
            value: Bytes(value(clock)),
            mod_revision: 80,
            ..KeyValue::default()
        };
        let header = Header {
            cluster_id: 7,
            member_id: 1,
            revision,
        };
        let source = SourceId::new("ours").unwrap();
        // The log is always 4 longer.
        let status = StatusAnswer {
            header,
            applied: revision + 4,
        };
        let log = Log::read(&header, &status).unwrap();
        ClockState::judge(Some(&kv), &header, log, seen, Some(&source))
    }

    #[test]
    fn a_clock_counts_under_its_own_history_and_life_only() {
        let is_usable =
            |clock: &StoredClock, revision, seen| judge(clock, revision, seen).usable().is_some();
        assert!(is_usable(&clock(), 100, (0, 0)));
        let other_history = StoredClock {
            history: 8,
            ..clock()
        };
        let earlier_life = StoredClock {
            lead: Some(5),
            ..clock()
        };
        let blank = StoredClock {
            begun: false,
            ..clock()
        };
        for unusable in [&other_history, &earlier_life, &blank] {
            assert!(!is_usable(unusable, 100, (0, 0)), "{unusable:?}");
        }
        // Where the process has seen as much of it; and no more.
        assert!(is_usable(&clock(), 100, (5, 20)));
        for seen in [(5, 21), (6, 1)] {
            assert!(!is_usable(&clock(), 100, seen));
        }
        // As long as there is a token left.
        assert!(is_usable(&clock(), 80 + Epoch::SIZE - 2, (0, 0)));
        assert!(!is_usable(&clock(), 80 + Epoch::SIZE - 1, (0, 0)));
    }

    #[test]
    fn an_epoch_begins_above_what_is_over_and_on_a_blank_clock_of_now() {
        let needs = |clock: &StoredClock, seen| match judge(clock, 100, seen) {
            ClockState::NeedsEpoch(needs) => (needs.epoch, needs.blank.is_some()),
            other => panic!("{other:?}"),
        };
        let blank = StoredClock {
            begun: false,
            ..clock()
        };
        assert_eq!(needs(&blank, (0, 0)), (5, true));
        assert_eq!(needs(&blank, (5, 1)), (5, true));
        assert_eq!(needs(&blank, (9, 1)), (9, false));
        // What was written in another history, or in another life, is written anew.
        let other_history = StoredClock {
            history: 8,
            ..blank.clone()
        };
        let earlier_life = StoredClock {
            lead: Some(5),
            ..blank
        };
        assert_eq!(needs(&other_history, (0, 0)), (5, false));
        assert_eq!(needs(&earlier_life, (0, 0)), (5, false));
        assert_eq!(needs(&clock(), (9, 1)), (9, false));
        let theirs = StoredClock {
            source: "theirs".into(),
            ..clock()
        };
        assert!(matches!(
            judge(&theirs, 100, (0, 0)),
            ClockState::OtherSource(_)
        ));
    }
}
