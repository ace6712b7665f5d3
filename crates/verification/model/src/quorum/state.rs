//! The state of the world.

use std::{
    cmp::Ordering,
    hash::{Hash, Hasher},
};

use super::{
    client::{Before, Choice, Progress},
    server::{Key, Renewed, Server, Stamp, Taken, Token},
    step::At,
};

/// The maximum number of requests.
pub(super) const REQUESTS: usize = 4;
/// The maximum number of other calls of each kind: renewals with the same token, releases and
/// breaks.
pub(super) const CALLS: usize = 2;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub nodes: Vec<Node>,
    pub requests: [Progress; REQUESTS],
    pub(super) renewals: [Renewal; CALLS],
    /// The grant that each release names.
    pub(super) releases: [Option<Holder>; CALLS],
    /// The last epoch that the database has assigned.
    pub(super) epoch: u8,
    /// The count that the process has in memory, if all clients are one process.
    pub(super) seen: Token,
    /// The number of past events of each limited kind.
    pub(super) spent: Spent,
    /// Whether a valid lease was removed by anything other than its own release.
    pub(super) ended_live: bool,
    /// Whether a renewal reported the loss of a lease that a majority stores.
    pub(super) lost_live: bool,
}

/// A node, and the answers that the clients have received from it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    pub name: Name,
    pub server: Server,
    /// A promoted replica. The server itself continues to run.
    pub(super) twin: Option<Server>,
    /// The data on its disk.
    pub(super) saved: Option<Server>,
    pub(super) asked: [Asked; REQUESTS],
    pub(super) renewed: [Option<Renewed>; CALLS],
    /// The key that each break has read.
    pub(super) found: [Option<Key>; CALLS],
}

/// A holder's view of its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holder {
    pub token: Token,
    /// The attempt to which the token was granted.
    pub attempt: u8,
    pub ticket: u8,
}

/// The name of the node in a counterexample. The nodes are sorted after each step, and the
/// comparison of states ignores names, so states that differ only in the order of the nodes are
/// equal.
#[derive(Clone, Copy, Debug)]
pub struct Name(pub usize);

impl PartialEq for Name {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Name {}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Name {
    fn cmp(&self, _: &Self) -> Ordering {
        Ordering::Equal
    }
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// The results of a request on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Asked {
    /// Whether the request has taken the key here.
    pub(super) ran: bool,
    /// The answer, if it still has an effect.
    pub(super) taken: Option<Taken>,
    /// The counter on which an epoch is begun: its replication id and its incarnation.
    pub(super) blank: Option<(u8, u8)>,
    /// The token that the take of the key has sealed here.
    pub(super) first: Option<Token>,
    /// Whether the chosen token is sealed here.
    pub(super) is_sealed: bool,
}

/// A renewal with the same token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Renewal {
    pub(super) before: Option<Before>,
    pub(super) holder: Option<Holder>,
    pub(super) renewed: Option<Token>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Spent {
    pub(super) late_takes: u8,
    pub(super) restarts: u8,
    pub(super) saves: u8,
    pub(super) flushes: u8,
    pub(super) evictions: u8,
}

impl State {
    pub(super) fn new(nodes: usize, has_counted: bool) -> Self {
        let node = |name| Node {
            name: Name(name),
            server: Server::new(has_counted),
            twin: None,
            saved: None,
            asked: Default::default(),
            renewed: Default::default(),
            found: Default::default(),
        };
        Self {
            nodes: (1..=nodes).map(node).collect(),
            requests: Default::default(),
            renewals: Default::default(),
            releases: Default::default(),
            epoch: u8::from(has_counted),
            seen: Token::default(),
            spent: Spent::default(),
            ended_live: false,
            lost_live: false,
        }
    }

    /// Returns all servers: the nodes, and then their twins.
    pub(super) fn servers(&self) -> impl Iterator<Item = At> {
        let nodes = self.nodes.iter().enumerate();
        let at = |(node, of): (usize, &Node), is_twin| At {
            node,
            is_twin,
            name: of.name,
        };
        let twins = nodes.clone().filter(|(_, node)| node.twin.is_some());
        let twins = twins.map(move |node| at(node, true));
        nodes.map(move |node| at(node, false)).chain(twins)
    }

    pub(super) fn server(&self, at: At) -> Option<&Server> {
        let node = &self.nodes[at.node];
        match at.is_twin {
            true => node.twin.as_ref(),
            false => Some(&node.server),
        }
    }

    pub(super) fn server_mut(&mut self, at: At) -> Option<&mut Server> {
        let node = &mut self.nodes[at.node];
        match at.is_twin {
            true => node.twin.as_mut(),
            false => Some(&mut node.server),
        }
    }

    /// Drops the epochs of requests that have chosen a token, and no longer begin an epoch on any
    /// node.
    pub(super) fn forget_epochs(&mut self) {
        for (request, progress) in self.requests.iter_mut().enumerate() {
            let is_over = self
                .nodes
                .iter()
                .all(|node| node.asked[request].blank.is_none());
            if progress.choice.is_some() && is_over {
                progress.epoch = None;
            }
        }
    }

    /// Returns the stamp that a seal of this request sends to this server.
    pub fn stamp(&self, request: usize, at: At) -> Option<Stamp> {
        let taken = self.nodes[at.node].asked[request].taken?;
        Some(taken.stamp)
    }

    /// Returns the counter on which an epoch is begun: its replication id and its incarnation.
    pub fn blank(&self, request: usize, at: At) -> Option<(u8, u8)> {
        self.nodes[at.node].asked[request].blank
    }

    /// Returns the token of a taken key that a seal replaces; `None` for a grant.
    pub fn replaced(&self, request: usize) -> Option<Token> {
        self.requests[request].holder.map(|holder| holder.token)
    }

    /// Returns the grant that a renewal in progress names.
    pub fn renewing(&self, renewal: usize) -> Option<Holder> {
        self.renewals[renewal].holder
    }

    /// Returns the grant that a release in progress names.
    pub fn releasing(&self, release: usize) -> Option<Holder> {
        self.releases[release]
    }

    pub(super) fn choice(&self, request: usize) -> Option<Choice> {
        self.requests[request].choice
    }
}
