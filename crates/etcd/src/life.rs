//! One life of etcd: from its beginning, or its return from a snapshot, to the next such return.
//!
//! An etcd that returns from a snapshot under the same names keeps its cluster id, and counts its
//! revisions from the snapshot on, once more. But its raft log begins anew. The *lead* is how far
//! the log is ahead of the revisions. Each revision is an entry of the log and not each entry a
//! revision, so within one life the lead never falls. A new life begins with a lead below zero, by
//! the whole history before.
//!
//! 1. One key holds the life: a random id, and a lead that this life has reached. Every counter
//!    names the life in which it was begun, and every transaction that grants compares the key.
//! 2. After each transaction that a grant follows from, the member that answered is asked for the
//!    length of its log. If the lead is below that of the key, etcd has returned from a snapshot.
//!    The process that notices it writes a new life, which ends the counters of all partitions.
//! 3. A member reports index and revision of no common moment. An index less a *later* revision was
//!    reached; an index less an *earlier* revision was not passed. A status reads its revision
//!    before its index, so it is the latest of the earlier ones.
//!
//! A copy of the data folder takes back the log along with the revisions, which this does not
//! notice. Two things stand against it: how far a process has seen the counters count, and the
//! highest token of the resource.

use serde::{Deserialize, Serialize};

use crate::messages::{Header, StatusAnswer};

/// The value of the life's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredLife {
    /// Distinguishes this life from every other.
    pub(crate) id: u64,
    pub(crate) cluster: u64,
    /// A lead that this life has reached; `None` if members do not report their log.
    pub(crate) lead: Option<i64>,
}

impl StoredLife {
    /// Whether an answer comes from this life.
    pub(crate) fn is_of(&self, answered: &Header, log: Log) -> bool {
        self.cluster == answered.cluster_id && !log.is_later_than(self.lead, answered.revision)
    }
}

/// The length of the log and a revision before it, as the member that gave an answer reports them
/// afterwards; nothing if it was not asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Log(Option<(i64, i64)>);

impl Log {
    /// Reads the length from a status; `None` if another member than the one that answered reports
    /// it.
    pub(crate) fn read(answered: &Header, status: &StatusAnswer) -> Option<Self> {
        let reported = &status.header;
        let is_same =
            (reported.cluster_id, reported.member_id) == (answered.cluster_id, answered.member_id);
        is_same.then_some(Self(Some((status.applied, reported.revision))))
    }

    /// A lead that was reached, by a revision that was read after the length.
    pub(crate) fn lead_reached(self, later_revision: i64) -> Option<i64> {
        Some(self.0?.0.saturating_sub(later_revision))
    }

    /// Whether a life with this lead is over, by a revision that was read before the length.
    fn is_later_than(self, lead: Option<i64>, earlier_revision: i64) -> bool {
        let not_passed = self.0.map(|(length, revision)| {
            let earlier = earlier_revision.max(revision);
            length.saturating_sub(earlier)
        });
        lead.zip(not_passed)
            .is_some_and(|(lead, not_passed)| lead > not_passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn return_from_a_snapshot_shows_in_the_lead() {
        // As etcd 3.4 answers: a young cluster; later; and restored from a snapshot of revision 52.
        let log = |length, revision| Log(Some((length, revision)));
        let (young, later, restored) = (log(4, 1), log(78, 72), log(4, 52));
        let lead = young.lead_reached(1);
        assert_eq!(lead, Some(3));
        assert!(!later.is_later_than(lead, 72));
        assert!(restored.is_later_than(lead, 52));
        // The restored one is restored again.
        let lead = restored.lead_reached(52);
        assert!(!log(12, 58).is_later_than(lead, 58));
        assert!(log(4, 58).is_later_than(lead, 58));
        // Others wrote between the answer and the status, which hides nothing.
        assert!(log(14, 68).is_later_than(lead, 58));
        assert!(!Log(None).is_later_than(lead, 58) && !restored.is_later_than(None, 52));
    }

    #[test]
    fn writes_between_index_and_revision_are_on_the_safe_side() {
        // Five writes between the length and the revision, and the other way round.
        let lead = Log(Some((10, 7))).lead_reached(12);
        assert_eq!(lead, Some(-2));
        assert!(!Log(Some((15, 7))).is_later_than(Some(3), 7));
    }

    #[test]
    fn only_the_member_that_answered_reports_its_log() {
        let header = |cluster_id, member_id| Header {
            cluster_id,
            member_id,
            revision: 1,
        };
        let status = StatusAnswer {
            header: header(7, 1),
            applied: 4,
        };
        assert_eq!(Log::read(&header(7, 1), &status), Some(Log(Some((4, 1)))));
        assert_eq!(Log::read(&header(7, 2), &status), None);
        assert_eq!(Log::read(&header(8, 1), &status), None);
    }
}
