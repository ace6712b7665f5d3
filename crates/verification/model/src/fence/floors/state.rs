//! The rows of one partition, the floor of the partition, and the holders and the removal that use
//! them.

use super::Floors;

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Resource {
    #[default]
    R,
    S,
}

impl Resource {
    pub const ALL: [Self; 2] = [Self::R, Self::S];
}

/// A holder. Holders are ordered by their grants.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Who {
    A,
    B,
    C,
}

impl Who {
    pub const ALL: [Self; 3] = [Self::A, Self::B, Self::C];
}

/// The purpose of a request: to write once under its token, or to raise the fence to its token.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Use {
    Write,
    Raise,
}

/// The result of a request.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Refused,
}

/// The progress of a request on the server.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Attempt {
    #[default]
    None,
    Sent(Use),
    /// The UPDATE of the request has found no row.
    NoRow(Use),
    /// The INSERT of the request has read this floor, and waits until no other transaction has
    /// locked the row.
    ReadFloor(Use, u8),
    /// The request has locked the row. The flag is whether the request has created the row, and has
    /// therefore locked the floor.
    Has(Use, bool),
}

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Lease {
    #[default]
    None,
    Held,
    Over,
}

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub struct Holder {
    /// The token; 0 before the grant.
    pub token: u8,
    pub lease: Lease,
    pub resource: Resource,
    pub attempt: Attempt,
    pub requests: u8,
    /// The result of its last request.
    pub outcome: Option<Outcome>,
}

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Removal {
    #[default]
    None,
    /// The removal has read which leases are held. It keeps each row whose token is not below this
    /// token.
    Asked(u8),
    LockedFloor(u8),
    /// The COMMIT removes this row. The flag is whether the removal has locked the floor.
    Removed(Resource, bool),
}

/// The amount by which a failover moves all tokens up.
pub const MOVE: u8 = 10;

/// The forged token of a client without a lease.
pub const FORGED: u8 = 100;

#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct State {
    /// The `max_token` of each row.
    pub rows: [Option<u8>; 2],
    pub floor: u8,
    pub holders: [Holder; 3],
    /// The rows and the floor of a standby that no longer replicates.
    pub standby: Option<([Option<u8>; 2], u8)>,
    /// The number of failovers that may still happen.
    pub failovers: u8,
    /// Whether the fence has not yet detected the last failover.
    pub changed: bool,
    pub removal: Removal,
    pub removals: u8,
    pub strangers: u8,
    /// Whether each row was used after the removal had read which rows are idle.
    pub used: [bool; 2],
    /// The highest stale token of each resource.
    pub highest_stale: [u8; 2],
    pub removed: [bool; 2],
    pub stale_wrote: bool,
    pub refused_for_nothing: bool,
    pub refused_by_floor: bool,
    pub written_after_removal: bool,
    /// Whether a failover has happened.
    pub failed_over: bool,
    /// Whether a holder has written after a failover.
    pub written_after_failover: bool,
}

impl State {
    pub fn new(world: &Floors) -> Self {
        let holder = Holder {
            requests: world.requests,
            ..Holder::default()
        };
        Self {
            holders: [holder; 3],
            failovers: world.failovers,
            removals: world.removals,
            strangers: world.strangers,
            ..Self::default()
        }
    }

    pub fn row(&self, resource: Resource) -> Option<u8> {
        self.rows[resource as usize]
    }

    pub fn was_removed(&self, resource: Resource) -> bool {
        self.removed[resource as usize]
    }

    /// The lowest token of the held leases.
    pub fn lowest_held(&self) -> Option<u8> {
        let mut holders = self.holders.iter();
        holders.find_map(|holder| (holder.lease == Lease::Held).then_some(holder.token))
    }
}
