//! The row of the fence for a resource, the protected value, and the last epoch. Each statement is
//! one step.

use super::{Rule, Rules};

/// The number of tokens in an epoch.
pub const EPOCH: u8 = 16;

/// The number of epochs by which a partition moves up for each change of the timeline. It is 1,000
/// in the crate.
const MOVE: u8 = 3;

/// The amount by which a row moves up if its token is above all epochs. It is 1,000,000 in the
/// crate.
const JUMP: u8 = 4;

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Database {
    /// The last epoch that was assigned.
    pub epoch: u8,
    pub max_token: u8,
    pub announced: u8,
    /// The lease of the announced token, or `None` if a higher token was used since.
    pub lease: Option<u8>,
    /// The protected value: the number of its last write.
    pub value: u8,
    /// The timeline of the server.
    pub timeline: u8,
    /// The timeline on which the row was last read.
    pub seen_on: u8,
}

pub enum Announcement {
    Announced,
    Superseded { next: u8, was_last: bool },
}

impl Default for Database {
    fn default() -> Self {
        Self {
            epoch: 1,
            max_token: 0,
            announced: 0,
            lease: None,
            value: 0,
            timeline: 0,
            seen_on: 0,
        }
    }
}

impl Database {
    pub fn next_epoch(&mut self, rules: Rules) -> u8 {
        self.catch_up(rules);
        self.epoch += 1;
        self.epoch
    }

    pub fn announce(&mut self, token: u8, lease: u8, renews: bool, rules: Rules) -> Announcement {
        self.catch_up(rules);
        let repeats = self.announced == token && rules.has(Rule::Repeats);
        let is_mine = self.lease == Some(lease);
        let is_next = self.announced < token
            || !rules.has(Rule::Highest)
            || repeats && (is_mine || !rules.has(Rule::WhoseLease));
        let is_renewable = !renews
            || self.announced == 0
            || is_mine && self.max_token <= self.announced
            || !rules.has(Rule::NoneBetween);
        if self.max_token < token && is_next && is_renewable {
            self.grant(token, lease, rules);
            return Announcement::Announced;
        }
        Announcement::Superseded {
            next: self.max_token.max(self.announced) + 1,
            was_last: repeats && is_mine,
        }
    }

    /// Returns the highest token of the row, but at least the beginning of the first epoch. A lease
    /// in this database gets the next token.
    pub fn seen(&self) -> u8 {
        self.max_token.max(self.announced).max(EPOCH)
    }

    pub fn grant(&mut self, token: u8, lease: u8, rules: Rules) {
        if rules.has(Rule::Raise) {
            self.max_token = self.max_token.max(token - 1);
        }
        self.announced = token;
        self.lease = Some(lease);
    }

    /// Writes, if the token is admitted.
    pub fn write(&mut self, token: u8, reusable: bool, value: u8, rules: Rules) -> bool {
        self.catch_up(rules);
        let admitted = token > self.max_token;
        if admitted {
            self.max_token = token - u8::from(reusable);
            self.value = value;
            if token > self.announced && rules.has(Rule::Ends) {
                self.lease = None;
            }
        }
        admitted
    }

    fn catch_up(&mut self, rules: Rules) {
        let failovers = self.timeline - self.seen_on;
        self.seen_on = self.timeline;
        if failovers > 0 && rules.has(Rule::MoveUp) {
            self.epoch += failovers * MOVE;
            let last_token = self.epoch * EPOCH + (EPOCH - 1);
            let seen = self.max_token.max(self.announced);
            self.max_token = if seen > last_token {
                seen + JUMP
            } else {
                last_token
            };
        }
    }
}
