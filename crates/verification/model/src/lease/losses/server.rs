//! The lease store. Each of its scripts is one step.

use super::{Losses, Rule};

/// The position of a token counter: an epoch and a number.
pub type Place = (u8, u8);

/// A server and its keys of one partition. Each resource has at most one lease.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Server {
    pub replication_id: u8,
    pub keys: Keys,
}

/// The data of a server, which a file or a replica may also contain.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct Keys {
    pub counter: Option<Counter>,
    /// The lease of each resource.
    pub leases: [Option<Stored>; 2],
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Counter {
    pub source: u8,
    pub replication_id: u8,
    pub incarnation: u8,
    pub epoch: u8,
    /// The last number; `None` while the counter is blank.
    pub n: Option<u8>,
}

/// A stored lease. Its stamp is the position of the counter when its token was taken.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Stored {
    pub id: u8,
    pub token: u8,
    pub stamp: Place,
}

/// The arguments of every script.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Call {
    pub resource: usize,
    pub id: u8,
    pub source: u8,
    /// The highest position that the issuer has seen.
    pub seen: Place,
    /// Whether a counter below `seen` is replaced.
    pub replaces: bool,
}

/// The blank counter for which an epoch is needed.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Blank {
    pub replication_id: u8,
    pub incarnation: u8,
    pub epoch: u8,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Answer {
    Granted { token: u8, place: Place },
    Held,
    Lost,
    NeedsEpoch(Blank),
    Behind,
    OtherSource,
}

/// The counter as a script sees it.
struct Now {
    own: bool,
    behind: bool,
    counts: bool,
    usable: bool,
    place: Place,
}

/// A server on which a script runs.
pub struct Script<'a> {
    pub server: &'a mut Server,
    /// The last incarnation that was drawn.
    pub incarnations: &'a mut u8,
    pub world: &'a Losses,
}

impl Script<'_> {
    pub fn acquire(&mut self, call: Call) -> Answer {
        let now = self.counter(call);
        let kept = match self.lease(call) {
            Some(lease) if lease.id != call.id => return Answer::Held,
            Some(lease) if self.stands(lease, &now) => Some(lease.clone()),
            _ => None,
        };
        if let Some(lease) = kept {
            return Answer::Granted {
                token: lease.token,
                place: now.place,
            };
        }
        if !now.usable && self.world.rules.has(Rule::Epoch) {
            return self.needs_epoch(call, &now);
        }
        self.grant(call)
    }

    pub fn renew(&mut self, call: Call, new_token: bool) -> Answer {
        let compares = self.world.rules.has(Rule::RenewCompares);
        let lease = match self.lease(call) {
            Some(lease) if !compares || lease.id == call.id => lease.clone(),
            _ => return Answer::Lost,
        };
        let now = self.counter(call);
        if now.behind && !call.replaces {
            return self.needs_epoch(call, &now);
        }
        if !self.stands(&lease, &now) {
            return Answer::Lost;
        }
        if !new_token {
            return Answer::Granted {
                token: lease.token,
                place: now.place,
            };
        }
        if !now.usable && self.world.rules.has(Rule::Epoch) {
            return self.needs_epoch(call, &now);
        }
        self.grant(call)
    }

    /// Removes a lease. Returns whether there was one.
    pub fn release(&mut self, call: Call) -> bool {
        let compares = self.world.rules.has(Rule::ReleaseCompares);
        let lease = &mut self.server.keys.leases[call.resource];
        lease
            .take_if(|lease| !compares || lease.id == call.id)
            .is_some()
    }

    /// Begins an epoch on a blank counter. Returns whether the epoch has begun.
    pub fn begin_epoch(&mut self, call: Call, blank: Blank, epoch: u8) -> bool {
        let now = self.counter(call);
        let Some(counter) = &mut self.server.keys.counter else {
            return false;
        };
        let same =
            !self.world.rules.has(Rule::Incarnation) || counter.incarnation == blank.incarnation;
        let above =
            !self.world.rules.has(Rule::AboveTheCounter) || epoch > counter.epoch.max(call.seen.0);
        let same_replication_id = self.server.replication_id == blank.replication_id;
        if !now.own || now.usable || !same_replication_id || !same || !above {
            return false;
        }
        counter.epoch = epoch;
        counter.n = Some(0);
        true
    }

    /// Whether the stamp of a lease is of an earlier epoch.
    pub fn is_of_last_epoch(&self, call: Call) -> bool {
        let counter = self.server.keys.counter.as_ref();
        let lease = self.lease(call).as_ref();
        let mut both = lease.zip(counter).into_iter();
        both.any(|(lease, counter)| lease.id == call.id && lease.stamp.0 < counter.epoch)
    }

    fn lease(&self, call: Call) -> &Option<Stored> {
        &self.server.keys.leases[call.resource]
    }

    fn counter(&self, call: Call) -> Now {
        let Some(counter) = &self.server.keys.counter else {
            return Now {
                own: false,
                behind: false,
                counts: false,
                usable: false,
                place: (0, 0),
            };
        };
        let own = (!self.world.rules.has(Rule::ReplicationId)
            || counter.replication_id == self.server.replication_id)
            && (!self.world.rules.has(Rule::Source) || counter.source == call.source);
        let place = (counter.epoch, counter.n.unwrap_or(0));
        let begun = own && counter.n.is_some();
        let behind = begun && place < call.seen && self.world.rules.has(Rule::Memory);
        let counts = begun && !behind;
        let is_left = place.1 + 1 < self.world.numbers || !self.world.rules.has(Rule::EndOfNumbers);
        Now {
            own,
            behind,
            counts,
            usable: counts && is_left,
            place,
        }
    }

    /// Whether a stored lease is valid: this counter has granted it, and has lost no data since.
    fn stands(&self, lease: &Stored, now: &Now) -> bool {
        (now.counts || !self.world.rules.has(Rule::LeaseOfACounter))
            && (lease.stamp.0 == now.place.0 || !self.world.rules.has(Rule::LeaseOfTheEpoch))
            && lease.stamp.1 <= now.place.1
    }

    fn needs_epoch(&mut self, call: Call, now: &Now) -> Answer {
        let found = &mut self.server.keys.counter;
        if let Some(counter) = found
            && counter.source != call.source
            && self.world.rules.has(Rule::Source)
        {
            return Answer::OtherSource;
        }
        if now.behind && !call.replaces {
            return Answer::Behind;
        }
        let epoch = now.place.0.max(call.seen.0);
        if !now.own || now.behind {
            *self.incarnations += 1;
            *found = Some(Counter {
                source: call.source,
                replication_id: self.server.replication_id,
                incarnation: *self.incarnations,
                epoch,
                n: None,
            });
        }
        let counter = found.as_mut().expect("the counter exists now");
        counter.epoch = counter.epoch.max(epoch);
        Answer::NeedsEpoch(Blank {
            replication_id: self.server.replication_id,
            incarnation: counter.incarnation,
            epoch,
        })
    }

    fn grant(&mut self, call: Call) -> Answer {
        // Without epochs, a lost counter counts from the beginning.
        let counter = self.server.keys.counter.get_or_insert(Counter {
            source: call.source,
            replication_id: self.server.replication_id,
            incarnation: 0,
            epoch: 0,
            n: None,
        });
        let n = counter.n.unwrap_or(0) + 1;
        counter.n = Some(n);
        let place = (counter.epoch, n);
        let token = counter.epoch * self.world.numbers + n;
        self.server.keys.leases[call.resource] = Some(Stored {
            id: call.id,
            token,
            stamp: place,
        });
        Answer::Granted { token, place }
    }
}
