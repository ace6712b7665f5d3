//! One server of a quorum, and what the scripts do there: `src/lease/quorum/lua`, step for step. Times are left out, as
//! any key may expire at any moment.

use super::rules::{Rule, Rules};

/// A token, and how far a clock has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token {
    pub epoch: u8,
    pub n: u8,
}

impl Token {
    pub const fn new(epoch: u8, n: u8) -> Self {
        Self { epoch, n }
    }
}

/// What a server gave a lease when its key was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    pub history: u8,
    pub incarnation: u8,
    pub serial: u8,
}

/// The clock of the partition. Without `n` it is blank, and `epoch` the one that was known last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Clock {
    pub history: u8,
    pub incarnation: u8,
    pub serial: u8,
    pub epoch: u8,
    pub n: Option<u8>,
}

impl Clock {
    fn counted(&self) -> Token {
        Token::new(self.epoch, self.n.unwrap_or(0))
    }
}

/// A lease. Without a token it is taken, and no grant yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub lease: u8,
    pub attempt: u8,
    pub stamp: Stamp,
    pub token: Option<Token>,
}

/// Who sends a script, and for which resource of the partition.
#[derive(Clone, Copy, Debug)]
pub struct Sender {
    pub lease: u8,
    pub attempt: u8,
    pub resource: usize,
}

/// What `take` answers where it has set the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Taken {
    pub stamp: Stamp,
    pub usable: bool,
    pub counted: Token,
    pub stored: Option<Token>,
}

/// What `renew` answers where there is something to be renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Renewed {
    pub token: Option<Token>,
    pub usable: bool,
    pub counted: Token,
}

/// The answer of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Taken(Taken),
    Held,
    Older,
    Lost,
    Sealed,
    Refused,
    Renewed(Renewed),
    Found(Key),
    Ended,
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Server {
    /// Another one after each restart.
    pub history: u8,
    /// The incarnation that was drawn last; none is drawn twice.
    drawn: u8,
    pub clock: Option<Clock>,
    /// Of each resource.
    pub keys: [Option<Key>; 2],
}

impl Server {
    /// One that has counted to the first token of the first epoch, or one without a clock.
    pub(super) fn new(has_counted: bool) -> Self {
        let clock = Clock {
            history: 0,
            incarnation: 0,
            serial: 1,
            epoch: 1,
            n: Some(1),
        };
        Self {
            history: 0,
            drawn: 0,
            clock: has_counted.then_some(clock),
            keys: [None; 2],
        }
    }

    /// Comes back with nothing, or what was saved of the clock and the keys.
    pub(super) fn restart(&mut self, saved: Option<Self>) {
        self.history += 1;
        self.clock = saved.and_then(|saved| saved.clock);
        self.keys = saved.map_or([None; 2], |saved| saved.keys);
    }

    /// What has become of a replica that has all that this server has, once it is promoted.
    pub(super) fn promoted(&self) -> Self {
        Self {
            history: self.history + 100,
            drawn: self.drawn + 100,
            ..*self
        }
    }

    fn owns(&self, rules: Rules, clock: &Clock) -> bool {
        clock.history == self.history || !rules.has(Rule::HistoryWhenTaking)
    }

    fn renews(&self, key: &Key) -> bool {
        key.stamp.history == self.history
    }

    pub(super) fn take(&mut self, rules: Rules, sender: Sender, only_mine: bool) -> Answer {
        let key = self.keys[sender.resource];
        if let Some(mine) = key.filter(|key| key.lease == sender.lease) {
            if mine.attempt > sender.attempt && rules.has(Rule::NewerAttemptsOnly) {
                return Answer::Older;
            }
        } else if only_mine {
            return Answer::Lost;
        } else if key.is_some() {
            return Answer::Held;
        }
        let same_history = key.is_some_and(|key| self.renews(&key));
        if only_mine {
            let counts = same_history || !rules.has(Rule::NewTokenNeedsHistory);
            if !counts || key.is_none_or(|key| key.token.is_none()) {
                return Answer::Lost;
            }
        }

        let owned = self.clock.filter(|clock| self.owns(rules, clock));
        let usable = owned.is_some_and(|clock| clock.n.is_some());
        let clock = owned.unwrap_or_else(|| {
            self.drawn += 1;
            let kept = self
                .clock
                .filter(|_| !rules.has(Rule::BlankUnderNewHistory));
            Clock {
                history: self.history,
                incarnation: self.drawn,
                serial: 0,
                epoch: self.clock.map_or(0, |clock| clock.epoch),
                n: kept.and_then(|clock| clock.n),
            }
        });
        let clock = self.clock.insert(clock);
        let again = key.filter(|key| same_history && key.attempt == sender.attempt);
        let stamp = again.map(|key| key.stamp).unwrap_or_else(|| {
            clock.serial += 1;
            Stamp {
                history: self.history,
                incarnation: clock.incarnation,
                serial: clock.serial,
            }
        });
        let keeps = same_history || !rules.has(Rule::HistoryOfStoredToken);
        let stored = key.filter(|_| keeps).and_then(|key| key.token);
        let counted = match usable {
            true => clock.counted(),
            false => Token::new(clock.epoch, 0),
        };
        self.keys[sender.resource] = Some(Key {
            lease: sender.lease,
            attempt: sender.attempt,
            stamp,
            token: stored,
        });
        Answer::Taken(Taken {
            stamp,
            usable,
            counted,
            stored,
        })
    }

    /// `count` is what the token was counted by.
    pub(super) fn seal(
        &mut self,
        rules: Rules,
        sender: Sender,
        stamp: Stamp,
        (token, count): (Token, Token),
    ) -> Answer {
        let history = rules.has(Rule::HistoryWhenSealing);
        let incarnation = rules.has(Rule::Incarnation);
        let of_clock = incarnation && rules.has(Rule::IncarnationOfClock);
        let attempt = rules.has(Rule::StampBesideLeaseId);
        let is_stamp = |of_key: Stamp| {
            of_key.history == stamp.history
                && (of_key.incarnation == stamp.incarnation || !incarnation)
                && of_key.serial == stamp.serial
        };
        let is_taken = |key: &Key| {
            key.lease == sender.lease
                && (key.attempt == sender.attempt || !attempt)
                && (is_stamp(key.stamp) || !attempt || !rules.has(Rule::StampBesideAttempt))
        };
        let is_taken = self.keys[sender.resource].is_some_and(|key| is_taken(&key));
        let own = |clock: &Clock| {
            let is_own = self.owns(rules, clock) && self.history == stamp.history;
            (is_own || !history) && (clock.incarnation == stamp.incarnation || !of_clock)
        };
        let Some(mut clock) = self.clock.filter(own) else {
            return Answer::Refused;
        };
        if !is_taken && rules.has(Rule::LeaseWhenSealing) {
            return Answer::Refused;
        }
        if clock.n.is_none() && count.epoch <= clock.epoch {
            return Answer::Refused;
        }
        let is_higher = count > clock.counted()
            || (count.n > clock.counted().n && !rules.has(Rule::NumbersOfOneEpoch));
        if clock.n.is_none() || is_higher || !rules.has(Rule::HigherOfBoth) {
            (clock.epoch, clock.n) = (count.epoch, Some(count.n));
        }
        self.clock = Some(clock);
        let key = self.keys[sender.resource].as_mut();
        if let Some(key) = key.filter(|key| key.lease == sender.lease) {
            key.token = Some(token);
        }
        Answer::Sealed
    }

    /// `token` is the one that the holder knows.
    pub(super) fn renew(&mut self, rules: Rules, sender: Sender, token: Token) -> Answer {
        if self.keys[sender.resource].is_none() && !rules.has(Rule::RenewalSetsNothing) {
            let stamp = Stamp {
                history: self.history,
                incarnation: 0,
                serial: 0,
            };
            self.keys[sender.resource] = Some(Key {
                lease: sender.lease,
                attempt: sender.attempt,
                stamp,
                token: Some(token),
            });
        }
        let is_renewed = |key: &Key| {
            key.lease == sender.lease
                && (key.token.is_some() || !rules.has(Rule::RenewalNeedsToken))
                && (self.renews(key) || !rules.has(Rule::RenewalNeedsHistory))
        };
        let Some(key) = self.keys[sender.resource].filter(is_renewed) else {
            return Answer::Lost;
        };
        let usable = |clock: &Clock| self.owns(rules, clock) && clock.n.is_some();
        Answer::Renewed(Renewed {
            token: key.token,
            usable: self.clock.as_ref().is_some_and(usable),
            counted: self.clock.map_or(Token::new(0, 0), |clock| clock.counted()),
        })
    }

    /// Takes back what an attempt has left: its key without a token, or with the one that it has stored.
    pub(super) fn abandon(
        &mut self,
        rules: Rules,
        sender: Sender,
        stored: Option<Token>,
    ) -> Answer {
        let is_left = |key: &Key| {
            key.lease == sender.lease
                && (key.attempt == sender.attempt || !rules.has(Rule::CleanUpOfAttempt))
                && (key.token.is_none() || key.token == stored || !rules.has(Rule::CleanUpOfToken))
        };
        self.end(sender.resource, is_left)
    }

    pub(super) fn look(&self, resource: usize) -> Answer {
        self.keys[resource].map_or(Answer::None, Answer::Found)
    }

    /// Ends the very lease that was found.
    pub(super) fn end_found(&mut self, rules: Rules, resource: usize, found: Key) -> Answer {
        let same = rules.has(Rule::ReleaseOfWhatWasFound);
        self.end(resource, |key| {
            *key == found || (key.lease == found.lease && !same)
        })
    }

    fn end(&mut self, resource: usize, is_one: impl Fn(&Key) -> bool) -> Answer {
        match self.keys[resource].take_if(|key| is_one(key)) {
            Some(_) => Answer::Ended,
            None => Answer::None,
        }
    }
}
