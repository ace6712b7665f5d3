//! One life of a cluster: from its beginning, or its return from a snapshot, to the next such return.
//!
//! A cluster that returns from a snapshot under the same names keeps its id, and counts its revisions from the snapshot
//! on, once more. But its raft log begins anew. So the *lead*, how far the log is ahead of the revisions, tells lives
//! apart: each revision is an entry of the log and not each entry a revision, so within one life the lead never falls; in
//! a new one it begins below zero, by the whole history of before.
//!
//! 1. A clock keeps a lead that its life had reached before it was begun.
//! 2. After each look at a clock that something follows from, its member is asked how long its log is: not after the look
//!    before a grant, since the grant looks once more. Where the lead is below the clock's now, the clock is from an
//!    earlier life. No time is measured for that, and nothing remembered.
//! 3. A member tells index and revision of no common moment. An index less a *later* revision was reached; one less
//!    an *earlier* revision was not passed.
//!
//! A log and a state that are put back together (a copy of the data folder) go back unseen by this. What a process
//! remembers, and the resource's last word, stand against it.

use super::messages::{Header, StatusAnswer};

/// The length of the log, as the member that gave an answer told it afterwards; nothing where members do not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Log(Option<i64>);

impl Log {
    /// Reads the length from the status that the same member has told after an answer; `None` where another member
    /// has told it.
    pub(super) fn read(answered: &Header, status: &StatusAnswer) -> Option<Self> {
        let told = &status.header;
        let is_same =
            (told.cluster_id, told.member_id) == (answered.cluster_id, answered.member_id);
        is_same.then_some(Self(Some(status.applied)))
    }

    /// Whether members tell how long the log is.
    pub(super) const fn is_told(self) -> bool {
        self.0.is_some()
    }

    /// A lead that was reached, by a revision that was read after the length.
    pub(super) fn lead_reached(self, later_revision: i64) -> Option<i64> {
        Some(self.0?.saturating_sub(later_revision))
    }

    /// Whether a clock with this lead is of an earlier life, by a revision that was read with it, before the length.
    pub(super) fn is_later_than(self, lead: Option<i64>, earlier_revision: i64) -> bool {
        let not_passed = self.0.map(|length| length.saturating_sub(earlier_revision));
        lead.zip(not_passed)
            .is_some_and(|(lead, not_passed)| lead > not_passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_from_before_a_restore_is_told_by_its_lead() {
        // As etcd 3.4 answers: a young cluster; later; and restored from a snapshot of revision 52.
        let (young, later, restored) = (Log(Some(4)), Log(Some(78)), Log(Some(4)));
        let lead = young.lead_reached(1);
        assert_eq!(lead, Some(3));
        assert!(!later.is_later_than(lead, 72));
        assert!(restored.is_later_than(lead, 52));
        // A restore of the restored one.
        let lead = restored.lead_reached(52);
        assert!(!Log(Some(12)).is_later_than(lead, 58));
        assert!(Log(Some(4)).is_later_than(lead, 58));
        assert!(!Log(None).is_later_than(lead, 58) && !restored.is_later_than(None, 52));
    }

    #[test]
    fn what_comes_in_between_is_on_the_safe_side() {
        // Five writes between the length and the revision, and the other way round.
        let lead = Log(Some(10)).lead_reached(12);
        assert_eq!(lead, Some(-2));
        assert!(!Log(Some(15)).is_later_than(Some(3), 7));
    }

    #[test]
    fn only_the_member_that_has_answered_tells() {
        let header = |cluster_id, member_id| Header {
            cluster_id,
            member_id,
            revision: 1,
        };
        let status = StatusAnswer {
            header: header(7, 1),
            applied: 4,
        };
        assert_eq!(Log::read(&header(7, 1), &status), Some(Log(Some(4))));
        assert_eq!(Log::read(&header(7, 2), &status), None);
        assert_eq!(Log::read(&header(8, 1), &status), None);
    }
}
