//! The source of epochs: one row of `tower_fence.epochs`, with its disk and its standby.

use super::rules::{Rule, Rules};

/// How many epochs a partition moves up when the timeline of its database has changed: more than a part that is
/// lost can have handed out. (1,000 in the crate.)
const MOVE: u8 = 3;

#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Database {
    /// The last epoch that was handed out.
    pub epoch: u8,
    /// What a crash leaves of it.
    pub disk: u8,
    /// What the standby has of it, where that does not follow any more.
    pub standby: Option<u8>,
    /// Whether the timeline has changed, and nobody has looked since.
    pub changed: bool,
    /// All epochs up to this one are dead.
    pub floor: u8,
}

impl Database {
    pub fn next_epoch(&mut self, at_least: u8, rules: Rules) -> u8 {
        self.catch_up(rules);
        self.epoch += 1;
        if rules.follows(Rule::AboveTheClock) {
            self.epoch = self.epoch.max(at_least);
        }
        self.flush(rules);
        self.epoch
    }

    /// Returns the lowest epoch that counts.
    pub fn report_epoch(&mut self, seen: u8, rules: Rules) -> u8 {
        if rules.follows(Rule::BroughtBack) {
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
        self.epoch = self.standby.take().expect("it was behind");
        self.disk = self.epoch;
        self.changed = noticed;
    }

    fn catch_up(&mut self, rules: Rules) {
        if std::mem::take(&mut self.changed) && rules.follows(Rule::MoveUp) {
            self.epoch += MOVE;
            self.floor = self.epoch;
        }
    }

    fn flush(&mut self, rules: Rules) {
        if rules.follows(Rule::Durable) {
            self.disk = self.epoch;
        }
    }
}
