//! The rows of one partition, its floor, and who uses them.

use super::Floors;

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Resource {
    R,
    S,
}

impl Resource {
    pub const ALL: [Self; 2] = [Self::R, Self::S];
}

/// A holder, by the order of the grants.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Who {
    A,
    B,
    C,
}

impl Who {
    pub const ALL: [Self; 3] = [Self::A, Self::B, Self::C];
}

/// What a request wants: to write under its token, once, or to raise the fence to it.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Use {
    Write,
    Raise,
}

/// How a request has ended.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Refused,
}

/// A request on the server.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Attempt {
    None,
    Sent(Use),
    /// Its UPDATE has found no row.
    NoRow(Use),
    /// Its INSERT has read this floor, and waits for whoever has the row.
    ReadFloor(Use, u8),
    /// It has the row, and the floor's lock where it has made the row.
    Has(Use, bool),
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Lease {
    None,
    Held,
    Over,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Holder {
    /// 0 before the grant.
    pub token: u8,
    pub lease: Lease,
    pub resource: Resource,
    pub attempt: Attempt,
    pub requests: u8,
    /// How its last request has ended.
    pub outcome: Option<Outcome>,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Removal {
    None,
    /// It has asked which leases are held, and will leave what is not below this.
    Asked(u8),
    LockedFloor(u8),
    /// This row is gone where it commits. Whether it has the floor's lock.
    Removed(Resource, bool),
}

/// By how much a failover moves all tokens up.
pub const MOVE: u8 = 10;

/// The token of a stranger, who has made it up.
pub const FORGED: u8 = 100;

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct State {
    /// `max_token` of each row.
    pub rows: [Option<u8>; 2],
    pub floor: u8,
    pub holders: [Holder; 3],
    /// What the standby has, where that does not follow any more: the rows, and the floor.
    pub standby: Option<([Option<u8>; 2], u8)>,
    /// How many failovers are left, and whether one was noticed by nobody yet.
    pub failovers: u8,
    pub changed: bool,
    pub removal: Removal,
    pub removals: u8,
    pub strangers: u8,
    /// The rows that are not idle: they were used since the removal has looked.
    pub used: [bool; 2],
    /// The highest token that was dead of each resource.
    pub dead: [u8; 2],
    pub removed: [bool; 2],
    pub dead_wrote: bool,
    pub refused_for_nothing: bool,
    pub refused_by_floor: bool,
    pub written_after_removal: bool,
    /// Whether a failover is over, and whether somebody has written since.
    pub failed_over: bool,
    pub written_after_failover: bool,
}

impl State {
    pub fn new(world: &Floors) -> Self {
        let holder = Holder {
            token: 0,
            lease: Lease::None,
            resource: Resource::R,
            attempt: Attempt::None,
            requests: world.requests,
            outcome: None,
        };
        Self {
            rows: [None; 2],
            floor: 0,
            holders: [holder; 3],
            standby: None,
            failovers: world.failovers,
            changed: false,
            removal: Removal::None,
            removals: world.removals,
            strangers: world.strangers,
            used: [false; 2],
            dead: [0; 2],
            removed: [false; 2],
            dead_wrote: false,
            refused_for_nothing: false,
            refused_by_floor: false,
            written_after_removal: false,
            failed_over: false,
            written_after_failover: false,
        }
    }

    pub fn row(&self, resource: Resource) -> Option<u8> {
        self.rows[resource as usize]
    }

    pub fn was_removed(&self, resource: Resource) -> bool {
        self.removed[resource as usize]
    }

    /// Whether a transaction has a resource's row, or its place in the index.
    pub fn is_locked(&self, resource: Resource) -> bool {
        let has = |holder: &Holder| {
            holder.resource == resource && matches!(holder.attempt, Attempt::Has(..))
        };
        let removes = matches!(self.removal, Removal::Removed(removed, _) if removed == resource);
        removes || self.holders.iter().any(has)
    }

    /// Whether a transaction has the floor's lock, which it shares.
    pub fn floor_is_shared(&self) -> bool {
        let shares = |holder: &Holder| {
            matches!(
                holder.attempt,
                Attempt::ReadFloor(..) | Attempt::Has(_, true)
            )
        };
        self.holders.iter().any(shares)
    }

    /// Whether a transaction is open that has changed something.
    pub fn is_written_to(&self) -> bool {
        let removes = matches!(self.removal, Removal::LockedFloor(_) | Removal::Removed(..));
        let writes = |holder: &Holder| matches!(holder.attempt, Attempt::Has(..));
        removes || self.holders.iter().any(writes)
    }

    /// The lowest token of a lease that is held.
    pub fn lowest_held(&self) -> Option<u8> {
        let mut holders = self.holders.iter();
        holders.find_map(|holder| (holder.lease == Lease::Held).then_some(holder.token))
    }
}
