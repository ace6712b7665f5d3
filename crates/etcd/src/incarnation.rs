//! Incarnation of etcd. It lasts from the creation of etcd, or its restore from a snapshot, to the
//! next restore.
//!
//! If etcd is restored from a snapshot under the same names, it keeps its cluster id, and continues
//! to count its revisions from that of the snapshot. However, its raft log begins again. The *lead*
//! is the length of the log minus the revision. Each revision is an entry of the log, and some
//! entries are not revisions, so the lead never decreases within one incarnation. After a restore
//! the lead is below zero, because the log is short and the revision is that of the snapshot.
//!
//! 1. One key stores the incarnation: a random id, and a lead that the incarnation has reached.
//!    Every counter contains the id of the incarnation in which it was written, and every
//!    transaction that grants compares the key.
//! 2. After each transaction on which a grant is based, the process asks the member that responded
//!    for the length of its log. If the lead is below that of the key, etcd was restored from a
//!    snapshot. The process that detects this writes a new incarnation, which makes the counters of
//!    all partitions invalid.
//! 3. The length and the revision that a member reports are not from the same moment. The length
//!    minus a *later* revision is a lead that was reached. The length minus an *earlier* revision
//!    is an upper bound of the lead. A Status call reads its revision before the length, so that
//!    revision is the latest of the earlier ones.
//!
//! A restored copy of the data folder has both an earlier log and an earlier revision, so the lead
//! does not reveal it. Two comparisons protect against it: a process refuses a counter below the
//! highest state that it has seen, and the fence refuses a token below the highest one of the
//! resource.

use serde::{Deserialize, Serialize};

use crate::messages::{Header, StatusAnswer};

/// Value of the key that stores the incarnation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredIncarnation {
    /// A number that distinguishes this incarnation from every other.
    pub(crate) id: u64,
    /// The cluster id.
    pub(crate) cluster: u64,
    /// A lead that this incarnation has reached, or `None` if members do not report their log.
    pub(crate) lead: Option<i64>,
}

impl StoredIncarnation {
    /// Returns whether a response comes from this incarnation.
    pub(crate) fn is_of(&self, answered: &Header, log: Log) -> bool {
        self.cluster == answered.cluster_id && !log.shows_end_of(self.lead, answered.revision)
    }
}

/// Length of the log, and a revision that was read before it. Both come from the status of the
/// member that answered the request. Empty if the status is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Log(Option<(i64, i64)>);

impl Log {
    /// Reads the length from a status. Returns `None` if the status comes from a different member
    /// than the response.
    pub(crate) fn read(answered: &Header, status: &StatusAnswer) -> Option<Self> {
        let reported = &status.header;
        let is_same =
            (reported.cluster_id, reported.member_id) == (answered.cluster_id, answered.member_id);
        is_same.then_some(Self(Some((status.applied, reported.revision))))
    }

    pub(crate) fn revision(self) -> Option<i64> {
        self.0.map(|(_, revision)| revision)
    }

    /// Returns a lead that was reached: the length minus a revision that was read after it.
    pub(crate) fn lead_reached(self, later_revision: i64) -> Option<i64> {
        Some(self.0?.0.saturating_sub(later_revision))
    }

    /// Returns whether this length shows that the incarnation with this lead has ended.
    /// `earlier_revision` was read before the length. An incarnation without a lead counts as ended
    /// as soon as the length is known, because a restore during that incarnation would not have
    /// been detected.
    fn shows_end_of(self, lead: Option<i64>, earlier_revision: i64) -> bool {
        let Some((length, revision)) = self.0 else {
            return false;
        };
        let upper_bound = length.saturating_sub(earlier_revision.max(revision));
        lead.is_none_or(|lead| lead > upper_bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restored_snapshot_shows_in_the_lead() {
        // These are responses of etcd 3.4: a new cluster, a later state of it, and the cluster
        // after a restore from a snapshot of revision 52.
        let log = |length, revision| Log(Some((length, revision)));
        let (young, later, restored) = (log(4, 1), log(78, 72), log(4, 52));
        let lead = young.lead_reached(1);
        assert_eq!(lead, Some(3));
        assert!(!later.shows_end_of(lead, 72));
        assert!(restored.shows_end_of(lead, 52));
        // The restored cluster is restored again.
        let lead = restored.lead_reached(52);
        assert!(!log(12, 58).shows_end_of(lead, 58));
        assert!(log(4, 58).shows_end_of(lead, 58));
        // Writes between the response and the status do not hide the restore.
        assert!(log(14, 68).shows_end_of(lead, 58));
        assert!(!Log(None).shows_end_of(lead, 58) && !Log(None).shows_end_of(None, 58));
        assert!(restored.shows_end_of(None, 52));
    }

    #[test]
    fn writes_between_index_and_revision_err_on_the_safe_side() {
        // In the first case, five writes occur after the length is read and before the revision is
        // read. In the second case, they occur after the revision is read and before the length is
        // read.
        let lead = Log(Some((10, 7))).lead_reached(12);
        assert_eq!(lead, Some(-2));
        assert!(!Log(Some((15, 7))).shows_end_of(Some(3), 7));
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
