//! The state of the world.

use std::hash::{Hash, Hasher};

use super::{
    At,
    client::{Before, Progress},
    server::{Key, Renewed, Server, Taken, Token},
};

/// The maximum number of requests.
pub(super) const REQUESTS: usize = 4;
/// The maximum number of other calls of each kind: renewals with the same token, releases and
/// breaks.
pub(super) const CALLS: usize = 2;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    pub nodes: Vec<Node>,
    pub requests: [Progress; REQUESTS],
    pub renewals: [Renewal; CALLS],
    /// The grant that each release names.
    pub releases: [Option<Holder>; CALLS],
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
    pub server: Server,
    /// A promoted replica. The server itself continues to run.
    pub(super) twin: Option<Server>,
    /// The data on its disk.
    pub(super) saved: Option<Server>,
    pub asked: [Asked; REQUESTS],
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

/// The results of a request on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Asked {
    /// Whether the request has taken the key here.
    pub(super) ran: bool,
    /// The answer, if it still has an effect.
    pub taken: Option<Taken>,
    /// The counter on which an epoch is begun: its replication id and its incarnation.
    pub blank: Option<(u8, u8)>,
    /// The token that the take of the key has sealed here.
    pub(super) first: Option<Token>,
    /// Whether the chosen token is sealed here.
    pub(super) is_sealed: bool,
}

/// A renewal with the same token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Renewal {
    pub(super) before: Option<Before>,
    pub holder: Option<Holder>,
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

/// States that differ only in the order of the nodes have the same hash, so a search counts them as
/// one.
impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let Self {
            nodes,
            requests,
            renewals,
            releases,
            epoch,
            seen,
            spent,
            ended_live,
            lost_live,
        } = self;
        let mut nodes: Vec<&Node> = nodes.iter().collect();
        nodes.sort();
        (nodes, requests, renewals, releases).hash(hasher);
        (epoch, seen, spent, ended_live, lost_live).hash(hasher);
    }
}

impl State {
    pub(super) fn new(nodes: usize, has_counted: bool) -> Self {
        let node = Node {
            server: Server::new(has_counted),
            twin: None,
            saved: None,
            asked: Default::default(),
            renewed: Default::default(),
            found: Default::default(),
        };
        Self {
            nodes: vec![node; nodes],
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
        let twins = nodes.clone().filter(|(_, node)| node.twin.is_some());
        let at = |is_twin| move |(node, _)| At { node, is_twin };
        nodes.map(at(false)).chain(twins.map(at(true)))
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
}
