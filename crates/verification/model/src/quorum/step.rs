//! The steps of the world, and their text in counterexamples.

use std::fmt;

use super::{client::Request, state::Name};

/// A step of a client, a node or the database. The numbers in a step of a renewal, a release or a
/// break are the index of the call and the index of its lease. Resources are numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// A request, with its index. In a counterexample, its text is its lease and its attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Of(pub usize, pub Request);

/// A server: a node, or its twin.
#[derive(Clone, Copy, PartialEq, Eq)]
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

impl fmt::Debug for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lease = char::from(b'a' + self.1.lease);
        let wish = if self.1.only_mine() {
            " for another token"
        } else {
            ""
        };
        write!(f, "{lease}{}{wish}", self.1.attempt)
    }
}

impl fmt::Debug for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let twin = if self.is_twin { "twin of " } else { "" };
        write!(f, "{twin}node {}", self.name.0)
    }
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nodes")?;
        let mut names = (0..8).filter(|name| self.names & (1 << name) != 0);
        names.try_for_each(|name| write!(f, " {name}"))
    }
}
