//! The steps of the world, and their text in counterexamples.

use std::fmt;

use super::{client::Request, state::Name};

/// A step of a client, a node or the database. Steps of renewals, releases and breaks name their
/// lease. Resources are numbered from 0.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A request takes a node. The flag is whether the key on the node has expired before the take.
    Take(Of, At, bool),
    Begin(Of, At),
    /// A request chooses a token from the answers of these nodes.
    Choose(Of, Nodes),
    Seal(Of, At),
    CleanUp(Of, At),
    Renew(usize, u8, At),
    Release(usize, u8, At),
    ReadKey(usize, u8, At),
    End(usize, u8, At),
    Expire(usize, At),
    Evict(At),
    Flush(At),
    Save(At),
    RestartEmpty(At),
    RestartFromDisk(At),
    Promote(At),
}

/// A request, with its index.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Of(pub usize, pub Request);

/// A server: a node, or its twin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The index of the node in the state.
    pub node: usize,
    pub is_twin: bool,
    pub name: Name,
}

/// A set of nodes: their indices and their names, as bit sets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Nodes {
    pub(super) places: u8,
    pub(super) names: u8,
}

impl Nodes {
    pub(super) fn has(self, place: usize) -> bool {
        self.places & (1 << place) != 0
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let twin = if self.is_twin { "the twin of " } else { "" };
        write!(f, "{twin}node {}", self.name.0)
    }
}

impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nodes")?;
        let mut names = (0..8).filter(|name| self.names & (1 << name) != 0);
        names.try_for_each(|name| write!(f, " {name}"))
    }
}

/// The name of a lease.
struct Lease(u8);

impl fmt::Display for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", char::from(b'a' + self.0))
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Take(Of(_, who), at, false) => write!(f, "{who} takes {at}"),
            Self::Take(Of(_, who), at, true) => {
                write!(f, "{who} takes {at}, on which the key has expired")
            }
            Self::Begin(Of(_, who), at) => write!(f, "{who} begins its epoch on {at}"),
            Self::Choose(Of(_, who), nodes) => write!(f, "{who} chooses a token by {nodes}"),
            Self::Seal(Of(_, who), at) => write!(f, "{who} seals {at}"),
            Self::CleanUp(Of(_, who), at) => {
                write!(f, "{who} gives up, and cleans up {at}")
            }
            Self::Renew(_, who, at) => write!(f, "{} is renewed on {at}", Lease(who)),
            Self::Release(_, who, at) => write!(f, "{} is released on {at}", Lease(who)),
            Self::ReadKey(_, who, at) => write!(f, "a break of {} reads {at}", Lease(who)),
            Self::End(_, who, at) => write!(f, "the break of {} ends it on {at}", Lease(who)),
            Self::Expire(_, at) => write!(f, "the key on {at} expires"),
            Self::Evict(at) => write!(f, "the counter of {at} is evicted"),
            Self::Flush(at) => write!(f, "{at} is flushed"),
            Self::Save(at) => write!(f, "{at} saves its data"),
            Self::RestartEmpty(at) => write!(f, "{at} is restarted empty"),
            Self::RestartFromDisk(at) => write!(f, "{at} is restarted with its saved data"),
            Self::Promote(at) => write!(f, "a replica of {at} is promoted, and {at} continues"),
        }
    }
}
