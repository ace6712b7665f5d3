//! One server of a quorum, with the scripts in `crates/redlock/src/lua`, step for step. Times are
//! left out, because any key may expire at any moment.

use super::{Rule, Rules};

/// A token, or the count of a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token {
    pub epoch: u8,
    pub n: u8,
}

impl Token {
    pub const fn new(epoch: u8, n: u8) -> Self {
        Self { epoch, n }
    }

    /// Returns the next token of the epoch.
    pub(super) const fn next(self) -> Self {
        Self::new(self.epoch, self.n + 1)
    }
}

/// The stamp that a server writes into a key when the key is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    pub replication_id: u8,
    pub incarnation: u8,
    pub serial: u8,
}

/// The token counter of the partition. A blank counter has no `n`, and its `epoch` is the last
/// known epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Counter {
    pub replication_id: u8,
    pub incarnation: u8,
    pub serial: u8,
    pub epoch: u8,
    pub n: Option<u8>,
}

impl Counter {
    fn counted(&self) -> Token {
        Token::new(self.epoch, self.n.unwrap_or(0))
    }

    fn set(&mut self, count: Token) {
        (self.epoch, self.n) = (count.epoch, Some(count.n));
    }
}

/// The key of a lease. A key without a token was taken, but its lease is not granted yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub lease: u8,
    pub attempt: u8,
    pub ticket: u8,
    pub stamp: Stamp,
    pub token: Option<Token>,
    /// Whether the request that took the key has sealed the token, and the key had no token before.
    pub mark: bool,
}

/// The sender of a script, and the index of its resource in the partition.
#[derive(Clone, Copy, Debug)]
pub struct Sender {
    pub lease: u8,
    pub attempt: u8,
    pub ticket: u8,
    pub resource: usize,
}

impl Sender {
    fn is(&self, key: &Key) -> bool {
        (key.attempt, key.ticket) == (self.attempt, self.ticket)
    }

    /// Whether the key belongs to a newer attempt than that of the sender.
    fn is_before(&self, key: &Key) -> bool {
        (key.attempt, key.ticket) > (self.attempt, self.ticket)
    }
}

/// The answer of `take` or `retake` after it has set the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Taken {
    pub stamp: Stamp,
    /// The incarnation of the counter.
    pub incarnation: u8,
    pub usable: bool,
    pub counted: Token,
    pub token: Option<Token>,
    /// Whether this attempt has sealed the token.
    pub is_sealed: bool,
}

/// The answer of `renew` after a renewal.
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
    Begun,
    Refused,
    Renewed(Renewed),
    Found(Key),
    Ended,
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Server {
    /// The replication id, which changes with each restart.
    pub replication_id: u8,
    /// The last incarnation that was drawn. Each incarnation is drawn only once.
    drawn: u8,
    pub counter: Option<Counter>,
    /// The key of each resource.
    pub keys: [Option<Key>; 2],
}

impl Server {
    /// Creates a server without a counter, or with a counter at the first token of the first epoch.
    pub(super) fn new(has_counted: bool) -> Self {
        let counter = Counter {
            replication_id: 0,
            incarnation: 0,
            serial: 1,
            epoch: 1,
            n: Some(1),
        };
        Self {
            replication_id: 0,
            drawn: 0,
            counter: has_counted.then_some(counter),
            keys: [None; 2],
        }
    }

    /// Restarts the server empty, or with the saved counter and keys.
    pub(super) fn restart(&mut self, saved: Option<Self>) {
        self.replication_id += 1;
        self.counter = saved.and_then(|saved| saved.counter);
        self.keys = saved.map_or([None; 2], |saved| saved.keys);
    }

    /// Returns the promoted replica, which has all data of this server.
    pub(super) fn promoted(&self) -> Self {
        Self {
            replication_id: self.replication_id + 100,
            drawn: self.drawn + 100,
            ..*self
        }
    }

    fn owns(&self, rules: Rules, counter: &Counter) -> bool {
        counter.replication_id == self.replication_id || !rules.has(Rule::ReplicationIdWhenTaking)
    }

    /// Whether the token of a key is valid.
    fn counts(&self, key: &Key) -> bool {
        key.stamp.replication_id == self.replication_id
    }

    /// Returns the counter, if it has an epoch.
    fn usable(&self, rules: Rules) -> Option<Counter> {
        let usable = |counter: &Counter| self.owns(rules, counter) && counter.n.is_some();
        self.counter.filter(usable)
    }

    /// Returns the counter. A counter of another replication id becomes blank.
    fn own(&mut self, rules: Rules) -> &mut Counter {
        let owned = self.counter.filter(|counter| self.owns(rules, counter));
        let counter = owned.unwrap_or_else(|| {
            self.drawn += 1;
            let kept = self
                .counter
                .filter(|_| !rules.has(Rule::BlankUnderNewReplicationId));
            Counter {
                replication_id: self.replication_id,
                incarnation: self.drawn,
                serial: 0,
                epoch: self.counter.map_or(0, |counter| counter.epoch),
                n: kept.and_then(|counter| counter.n),
            }
        });
        self.counter.insert(counter)
    }

    /// Returns the count with which a take seals a free key.
    fn next_count(&self, rules: Rules, proposal: Option<Token>) -> Option<Token> {
        let usable = self.usable(rules).map(|counter| counter.counted());
        let missing = Some(Token::new(1, 0))
            .filter(|_| self.counter.is_none() && !rules.has(Rule::MissingSealsNothing));
        let blank = self
            .counter
            .map(|counter| Token::new(counter.epoch.max(1), 0))
            .filter(|_| !rules.has(Rule::BlankSealsNothing));
        let counted = usable.or(missing).or(blank)?;
        let above = |proposal: &Token| *proposal > counted || !rules.has(Rule::ProposalAbove);
        let next = match rules.has(Rule::NextAboveCounter) {
            true => counted.next(),
            false => counted,
        };
        Some(proposal.filter(above).unwrap_or(next))
    }

    pub(super) fn take(&mut self, rules: Rules, sender: Sender, proposal: Option<Token>) -> Answer {
        let key = self.keys[sender.resource];
        let mine = key.filter(|key| key.lease == sender.lease);
        if key.is_some() && mine.is_none() && rules.has(Rule::SealWhereFree) {
            return Answer::Held;
        }
        if mine.is_some_and(|key| sender.is_before(&key)) && rules.has(Rule::NewerAttemptsOnly) {
            return Answer::Older;
        }
        let count = self.next_count(rules, proposal).filter(|_| mine.is_none());
        let usable = self.usable(rules).is_some();
        self.own(rules);
        let taken = self.stamped(sender, mine);
        let kept = mine.filter(|key| self.counts(key));
        let is_repeated = mine.is_some_and(|key| self.counts(&key) && sender.is(&key));
        let mark = kept.is_some_and(|key| key.mark && key.ticket == sender.ticket);
        let mut key = Key {
            token: kept.and_then(|key| key.token),
            mark,
            ..taken
        };
        if let Some(count) = count {
            (key.token, key.mark) = (Some(count), true);
            if let Some(counter) = &mut self.counter
                && rules.has(Rule::SealCounts)
            {
                counter.set(count);
            }
        }
        self.keys[sender.resource] = Some(key);
        let is_sealed = count.is_some() || (is_repeated && key.mark);
        Answer::Taken(self.taken(key, usable || count.is_some(), is_sealed))
    }

    /// Takes the key of a lease that has exactly this token, in a request for another token.
    pub(super) fn retake(&mut self, rules: Rules, sender: Sender, token: Token) -> Answer {
        let counts = |key: &Key| self.counts(key) || !rules.has(Rule::NewTokenNeedsReplicationId);
        let key = self.keys[sender.resource];
        let mine = key.filter(|key| key.lease == sender.lease && counts(key));
        let Some(mine) = mine else {
            return Answer::Lost;
        };
        if sender.is_before(&mine) && rules.has(Rule::NewerAttemptsOnly) {
            return Answer::Older;
        }
        let names = rules.has(Rule::NewTokenNamesToken);
        if mine.token != Some(token) && names || mine.token.is_none() {
            return Answer::Lost;
        }
        let usable = self.usable(rules).is_some();
        self.own(rules);
        let key = Key {
            token: mine.token,
            mark: mine.mark && sender.is(&mine),
            ..self.stamped(sender, Some(mine))
        };
        self.keys[sender.resource] = Some(key);
        Answer::Taken(self.taken(key, usable, false))
    }

    /// Returns the key of an attempt with its stamp. If the attempt has taken the key before, the
    /// stamp stays the same.
    fn stamped(&mut self, sender: Sender, before: Option<Key>) -> Key {
        let replication_id = self.replication_id;
        let again =
            before.filter(|key| key.stamp.replication_id == replication_id && sender.is(key));
        let stamp = match (again, &mut self.counter) {
            (Some(key), _) => key.stamp,
            (None, Some(counter)) => {
                counter.serial += 1;
                Stamp {
                    replication_id,
                    incarnation: counter.incarnation,
                    serial: counter.serial,
                }
            }
            (None, None) => unreachable!("a script that takes a key has a counter"),
        };
        Key {
            lease: sender.lease,
            attempt: sender.attempt,
            ticket: sender.ticket,
            stamp,
            token: None,
            mark: false,
        }
    }

    fn taken(&self, key: Key, usable: bool, is_sealed: bool) -> Taken {
        let counter = self
            .counter
            .expect("a script that takes a key has a counter");
        let counted = match usable {
            true => counter.counted(),
            false => Token::new(counter.epoch, 0),
        };
        Taken {
            stamp: key.stamp,
            incarnation: counter.incarnation,
            usable,
            counted,
            token: key.token,
            is_sealed,
        }
    }

    /// Seals a token. `count` is the count from which the token was computed. `replaced` is the
    /// token that it replaces, or `None` for a grant.
    pub(super) fn seal(
        &mut self,
        rules: Rules,
        sender: Sender,
        stamp: Stamp,
        (token, count): (Token, Token),
        replaced: Option<Token>,
    ) -> Answer {
        let compares_id = rules.has(Rule::ReplicationIdWhenSealing);
        let attempt = rules.has(Rule::StampBesideLeaseId);
        let is_taken = |key: &Key| {
            key.lease == sender.lease && (sender.is(key) && key.stamp == stamp || !attempt)
        };
        let is_taken = self.keys[sender.resource].is_some_and(|key| is_taken(&key));
        let own = |counter: &Counter| {
            let is_own = self.owns(rules, counter) && self.replication_id == stamp.replication_id;
            (is_own || !compares_id) && counter.incarnation == stamp.incarnation
        };
        let unknown = rules.has(Rule::BlankIsUnknown);
        let usable = |counter: &Counter| counter.n.is_some() || !unknown;
        let Some(mut counter) = self.counter.filter(usable).filter(own) else {
            return Answer::Refused;
        };
        if !is_taken && rules.has(Rule::LeaseWhenSealing) {
            return Answer::Refused;
        }
        let mine = |key: &&mut Key| key.lease == sender.lease;
        if let Some(key) = self.keys[sender.resource].as_mut().filter(mine)
            && key.token != Some(token)
        {
            let names = rules.has(Rule::NewTokenNamesToken);
            if replaced.is_some() && key.token != replaced && names {
                return Answer::Refused;
            }
            if key.token > Some(token) && rules.has(Rule::OnlyRaises) {
                return Answer::Refused;
            }
            key.mark |= key.token.is_none();
            key.token = Some(token);
        }
        let counted = counter.counted();
        if count > counted || !rules.has(Rule::HigherOfBoth) {
            counter.set(count);
        }
        self.counter = Some(counter);
        Answer::Sealed
    }

    /// Begins an epoch on the counter that a take has returned.
    pub(super) fn begin(&mut self, (replication_id, incarnation): (u8, u8), epoch: u8) -> Answer {
        let is_one = |counter: &&mut Counter| {
            counter.replication_id == replication_id
                && self.replication_id == replication_id
                && counter.incarnation == incarnation
        };
        let Some(counter) = self.counter.as_mut().filter(is_one) else {
            return Answer::Refused;
        };
        if counter.n.is_some() && counter.epoch == epoch {
            return Answer::Begun;
        }
        if epoch <= counter.epoch {
            return Answer::Refused;
        }
        counter.set(Token::new(epoch, 0));
        Answer::Begun
    }

    /// Renews a lease. `token` is the token of the holder, and `sender` is the attempt to which it
    /// was granted.
    pub(super) fn renew(&mut self, rules: Rules, sender: Sender, token: Token) -> Answer {
        if self.keys[sender.resource].is_none() && !rules.has(Rule::RenewalSetsNothing) {
            let stamp = Stamp {
                replication_id: self.replication_id,
                incarnation: 0,
                serial: 0,
            };
            self.keys[sender.resource] = Some(Key {
                lease: sender.lease,
                attempt: sender.attempt,
                ticket: sender.ticket,
                stamp,
                token: Some(token),
                mark: false,
            });
        }
        let is_renewed = |key: &Key| {
            key.lease == sender.lease
                && (self.counts(key) || !rules.has(Rule::RenewalNeedsReplicationId))
        };
        let usable = self.usable(rules);
        let Some(mut key) = self.keys[sender.resource].filter(is_renewed) else {
            return Answer::Lost;
        };
        let names = rules.has(Rule::RenewalNamesToken);
        let lags = |key: &Key| {
            let is_lower = key.token < Some(token) || !rules.has(Rule::RepairRaises);
            key.mark && sender.is(key) && key.token.is_some() && is_lower
        };
        let of_counter = usable.filter(|counter| counter.incarnation == key.stamp.incarnation);
        if let Some(mut counter) = of_counter.filter(|_| key.token != Some(token) && lags(&key)) {
            key.token = Some(token);
            self.keys[sender.resource] = Some(key);
            if token > counter.counted() {
                counter.set(token);
            }
            self.counter = Some(counter);
        }
        if (key.token != Some(token) && names) || key.token.is_none() {
            return Answer::Lost;
        }
        Answer::Renewed(Renewed {
            token: key.token,
            usable: usable.is_some(),
            counted: self
                .counter
                .map_or(Token::new(0, 0), |counter| counter.counted()),
        })
    }

    /// Removes the lease that was granted with this token to the attempt of the sender.
    pub(super) fn release(&mut self, rules: Rules, sender: Sender, token: Token) -> Answer {
        let is_one = |key: &Key| {
            let is_granted = match key.token {
                Some(stored) => stored <= token,
                None => !sender.is_before(key),
            };
            let by_attempt = !sender.is_before(key) && !rules.has(Rule::ReleaseOfToken);
            let is_own = sender.is(key) && (key.mark || !rules.has(Rule::ReleaseOfMark));
            let by_lease = !rules.has(Rule::ReleaseOfAttempt);
            key.lease == sender.lease && (is_granted || by_attempt || is_own || by_lease)
        };
        self.end(sender.resource, is_one)
    }

    /// Removes the key of an abandoned request.
    pub(super) fn abandon(
        &mut self,
        rules: Rules,
        sender: Sender,
        proposal: Option<Token>,
    ) -> Answer {
        let is_left = |key: &Key| {
            let is_own = match rules.has(Rule::CleanUpOfMark) {
                true => key.mark,
                false => key.token == proposal,
            };
            key.lease == sender.lease
                && (key.ticket == sender.ticket || !rules.has(Rule::CleanUpOfRequest))
                && (key.token.is_none() || is_own || !rules.has(Rule::CleanUpOfRequest))
        };
        self.end(sender.resource, is_left)
    }

    pub(super) fn read_key(&self, resource: usize) -> Answer {
        self.keys[resource].map_or(Answer::None, Answer::Found)
    }

    /// Removes the lease only if its key is `found`.
    pub(super) fn end_found(&mut self, rules: Rules, resource: usize, found: Key) -> Answer {
        let same = rules.has(Rule::EndOfWhatWasFound);
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
