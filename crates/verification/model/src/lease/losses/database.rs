//! The source of epochs: one row of `tower_fence.epochs`, with its disk and its standby.

use super::{Rule, Rules};

/// The number of epochs by which a partition moves up after a change of the timeline. The lost
/// transactions cannot have assigned that many epochs. It is 1,000 in the crate.
const MOVE: u8 = 3;

#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Database {
    /// The last epoch that was assigned.
    pub epoch: u8,
    /// The last epoch that is on disk, which survives a crash.
    pub disk: u8,
    /// The last epoch of a standby that no longer replicates.
    pub standby: Option<u8>,
    /// Whether the timeline has changed since the row was last read.
    pub changed: bool,
    /// The highest epoch that is no longer valid.
    pub floor: u8,
}

impl Database {
    pub fn next_epoch(&mut self, at_least: u8, rules: Rules) -> u8 {
        self.catch_up(rules);
        self.epoch += 1;
        if rules.has(Rule::AboveTheCounter) {
            self.epoch = self.epoch.max(at_least);
        }
        self.flush(rules);
        self.epoch
    }

    /// Records an epoch that an issuer reports. Returns this epoch, or the lowest valid epoch if
    /// this epoch is no longer valid.
    pub fn report_epoch(&mut self, seen: u8, rules: Rules) -> u8 {
        if rules.has(Rule::ReReported) {
            self.epoch = self.epoch.max(seen);
        }
        self.catch_up(rules);
        self.flush(rules);
        seen.max(self.floor + 1)
    }

    pub fn crash(&mut self) {
        self.epoch = self.disk;
    }

    pub fn promote(&mut self, noticed: bool) {
        self.epoch = self.standby.take().expect("a standby lags");
        self.disk = self.epoch;
        self.changed = noticed;
    }

    fn catch_up(&mut self, rules: Rules) {
        if std::mem::take(&mut self.changed) && rules.has(Rule::MoveUp) {
            self.epoch += MOVE;
            self.floor = self.epoch;
        }
    }

    fn flush(&mut self, rules: Rules) {
        if rules.has(Rule::Durable) {
            self.disk = self.epoch;
        }
    }
}
