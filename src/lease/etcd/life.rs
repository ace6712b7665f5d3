//! One life of a cluster: from its beginning, or its return from a snapshot, to the next such return.
//!
//! A cluster that returns from a snapshot under the same names keeps its id, and counts its revisions from the snapshot
//! on, once more. But its raft log begins anew. So the *lead*, how far the log is ahead of the revisions, tells lives
//! apart: each revision is an entry of the log and not each entry a revision, so within one life the lead never falls; in
//! a new one it begins below zero, by the whole history of before.
//!
//! 1. A clock keeps a lead that its life had reached when it was begun. Where that is above the lead of now, the clock is
//!    from an earlier life. One that was begun after the lead of now was read is of this life anyway.
//! 2. The lead is read at the first contact, after a pause, and whenever revisions go back: a cluster that has
//!    answered a moment ago was not restored since.
//!
//! A log and a state that are put back together (a copy of the data folder) go back unseen by this. What a process
//! remembers, and the resource's last word, stand against it.

use std::time::Duration;

use tokio::time::Instant;

use super::messages::{Header, StatusAnswer};

/// How long a cluster may have been silent before its life is in doubt: no restore is as fast.
const QUIET: Duration = Duration::from_secs(1);

/// A life, as it was when it was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    pub(super) cluster_id: u64,
    /// How far it had counted.
    pub(super) revision: i64,
    /// A lead that it had reached then, and one that it had not passed; nothing where its members do not tell.
    pub(super) lead: Option<(i64, i64)>,
}

impl Life {
    /// Reads a life from two answers of one member, the second one asked after the first one was there.
    ///
    /// A member answers index and revision of no common moment: so the lead is between the first index less the
    /// second revision, and the second index less the first revision.
    pub(super) fn read(first: &StatusAnswer, second: &StatusAnswer) -> Option<Self> {
        let (one, two) = (&first.header, &second.header);
        if (one.cluster_id, one.member_id) != (two.cluster_id, two.member_id) {
            return None;
        }
        Some(Self {
            cluster_id: two.cluster_id,
            revision: two.revision,
            lead: Some((
                first.applied.saturating_sub(two.revision),
                second.applied.saturating_sub(one.revision),
            )),
        })
    }

    /// Whether a clock that was begun in this revision, with this lead, is of an earlier life.
    pub(super) fn is_later_than(&self, begun: i64, lead: Option<i64>) -> bool {
        match (lead, self.lead) {
            (Some(lead), Some((_, highest))) => begun <= self.revision && lead > highest,
            _ => false,
        }
    }
}

/// What is known of the life that goes on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contact {
    pub(super) life: Life,
    /// How far it has counted.
    revision: i64,
    heard: Instant,
}

impl Contact {
    pub(super) fn new(life: Life) -> Self {
        Self {
            life,
            revision: life.revision,
            heard: Instant::now(),
        }
    }

    /// Whether the life surely goes on.
    pub(super) fn is_recent(&self) -> bool {
        self.heard.elapsed() < QUIET
    }

    /// Takes in an answer, of which no part was there before `asked`. False where it is from another life.
    pub(super) fn hear(&mut self, header: &Header, asked: &Self) -> bool {
        if header.cluster_id != self.life.cluster_id || header.revision < asked.revision {
            return false;
        }
        self.revision = self.revision.max(header.revision);
        self.heard = Instant::now();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(applied: i64, revision: i64) -> StatusAnswer {
        StatusAnswer {
            header: Header {
                cluster_id: 7,
                member_id: 1,
                revision,
            },
            applied,
        }
    }

    #[test]
    fn a_clock_from_before_a_restore_is_told_by_its_lead() {
        // As etcd 3.4 answers: a young cluster; later; and restored from a snapshot of revision 52.
        let young = Life::read(&status(4, 1), &status(4, 1)).unwrap();
        let later = Life::read(&status(78, 72), &status(78, 72)).unwrap();
        let restored = Life::read(&status(4, 52), &status(4, 52)).unwrap();
        assert_eq!(young.lead, Some((3, 3)));
        let lowest = |life: &Life| life.lead.map(|(lowest, _)| lowest);
        assert!(!later.is_later_than(1, lowest(&young)));
        assert!(restored.is_later_than(1, lowest(&young)));
        // One that was begun afterwards is of this life, whatever the lead has become by then.
        assert!(!restored.is_later_than(53, lowest(&young)));
        // A restore of the restored one.
        let again = Life::read(&status(4, 60), &status(4, 60)).unwrap();
        assert!(again.is_later_than(53, lowest(&restored)));
        assert!(!restored.is_later_than(1, None));
    }

    #[test]
    fn the_lead_is_bounded_where_writes_come_in_between() {
        let life = Life::read(&status(10, 5), &status(14, 9)).unwrap();
        assert_eq!(life.lead, Some((1, 9)));
        let mut other = status(10, 5);
        other.header.member_id = 2;
        assert_eq!(Life::read(&status(10, 5), &other), None);
    }
}
