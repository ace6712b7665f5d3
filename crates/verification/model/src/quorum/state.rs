//! The state of the world, and its steps.

use std::{
    cmp::Ordering,
    hash::{Hash, Hasher},
};

use super::{
    client::{Before, Choice, Progress},
    server::{Key, Renewed, Server, Stamp, Taken, Token},
    step::At,
};

/// How many requests there can be; and renewals with the same token, releases, and leases that are broken.
pub(super) const REQUESTS: usize = 4;
pub(super) const CALLS: usize = 2;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub nodes: Vec<Node>,
    pub requests: [Progress; REQUESTS],
    pub(super) renewals: [Renewal; CALLS],
    /// What a release names.
    pub(super) releases: [Option<Holder>; CALLS],
    /// The epoch that the database has handed out last.
    pub(super) epoch: u8,
    /// How far the process has seen the nodes count, where it remembers that.
    pub(super) seen: Token,
    /// What has happened of that which can happen so many times only.
    pub(super) spent: Spent,
    /// Something has ended a lease that stood, and was not asked to.
    pub(super) ended_live: bool,
    /// A lease was answered to be lost that a majority had.
    pub(super) lost_live: bool,
}

/// A node, and what the clients have from it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    pub name: Name,
    pub server: Server,
    /// A replica that was promoted, while the server goes on.
    pub(super) twin: Option<Server>,
    /// What was written to its disk.
    pub(super) saved: Option<Server>,
    pub(super) asked: [Asked; REQUESTS],
    pub(super) renewed: [Option<Renewed>; CALLS],
    /// What was found of a lease that is to be broken.
    pub(super) found: [Option<Key>; CALLS],
}

/// What a holder knows of its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holder {
    pub token: Token,
    /// The attempt that was granted it.
    pub attempt: u8,
    pub ticket: u8,
}

/// What a node is called where a story is told. States that differ only in the order of the nodes are one: the nodes
/// are sorted after each step, and their names do not count.
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

/// What a request has from a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Asked {
    /// Its key was taken here once.
    pub(super) ran: bool,
    /// The answer, as long as it is of use.
    pub(super) taken: Option<Taken>,
    /// The counter that an epoch is begun on: history and incarnation.
    pub(super) blank: Option<(u8, u8)>,
    /// The token that was sealed here when the key was taken.
    pub(super) first: Option<Token>,
    /// The token that was chosen is sealed here.
    pub(super) is_sealed: bool,
}

/// A renewal with the token that the lease has.
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

    /// All servers: the nodes, and then their twins.
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

    /// Forgets the epochs of requests that have chosen a token, and begin them nowhere any more.
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

    /// What a seal of this request carries to this server.
    pub fn stamp(&self, request: usize, at: At) -> Option<Stamp> {
        let taken = self.nodes[at.node].asked[request].taken?;
        Some(taken.stamp)
    }

    /// The counter that an epoch is begun on: history and incarnation.
    pub fn blank(&self, request: usize, at: At) -> Option<(u8, u8)> {
        self.nodes[at.node].asked[request].blank
    }

    /// The token that a taken key has, and that a seal replaces. Nothing for a grant.
    pub fn replaced(&self, request: usize) -> Option<Token> {
        self.requests[request].holder.map(|holder| holder.token)
    }

    /// What a renewal names that is under way.
    pub fn renewing(&self, renewal: usize) -> Option<Holder> {
        self.renewals[renewal].holder
    }

    /// What a release names that is under way.
    pub fn releasing(&self, release: usize) -> Option<Holder> {
        self.releases[release]
    }

    pub(super) fn choice(&self, request: usize) -> Option<Choice> {
        self.requests[request].choice
    }
}
