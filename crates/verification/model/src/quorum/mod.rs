//! Leases on a quorum of Redis nodes. A token is chosen from the answers of a majority, and sealed
//! on a majority.

mod bounds;
mod client;
mod possible;
mod server;
mod state;
mod steps;

use std::fmt;

use stateright::{Model, Property};

use self::client::Before;
pub use self::{
    bounds::Quorum,
    client::{Choice, Progress, Request, Wish},
    server::{Answer, Counter, Key, Renewed, Sender, Server, Stamp, Taken, Token},
    state::{Asked, Holder, Node, Renewal, State},
};
use crate::search::rules;

rules! {
    Seal: "a token is granted when it is sealed, not when it is chosen",
    SealWhereFree: "a take does not replace the key of another lease",
    ProposalAbove: "a take seals a proposal only above the counter",
    NextAboveCounter: "a take without a proposal seals the next number of the counter",
    MissingSealsNothing: "a take seals nothing if the counter is missing",
    BlankSealsNothing: "a take seals nothing if the counter is blank",
    SealCounts: "a take that seals sets the counter",
    SealedOnMajority: "a grant in the first trip requires a majority of sealed nodes",
    SameTokenSealed: "a grant in the first trip requires the same token on a majority of nodes",
    TripsApart: "seals of the first trip are not counted in the second trip",
    LateAnswers: "answers of the first trip are ignored after the choice of the token",
    ProposalOfCountedEpoch: "a proposal is in an epoch that a counter of the nodes has reached",
    SealOnMajority: "a grant in the second trip requires a majority of sealed nodes",
    LeaseWhenSealing: "a seal requires that the key still belongs to the lease",
    StampBesideLeaseId: "a seal compares the attempt, not only the lease id",
    ReplicationIdWhenSealing: "a seal compares the replication id",
    OnlyRaises: "a new token for a lease is above its stored token",
    HigherOfBoth: "a seal never lowers the counter",
    HighestOfMajority:
        "a token is above the highest counter of a majority, not only above one counter",
    ReplicationIdWhenTaking: "a counter is valid only under its replication id",
    BlankUnderNewReplicationId: "under another replication id, a counter becomes blank",
    BlankIsUnknown: "a blank counter means that the count is unknown, not that it is 0",
    EpochFromDatabase: "a new epoch comes from the database, not from the highest known epoch",
    StoredOnMajority: "a stored token is returned again only if a majority of the nodes has it",
    NewerAttemptsOnly: "an attempt that is older than the attempt of the key is refused",
    RenewalNamesToken: "a renewal compares the token of the holder with that of the key",
    RenewalNeedsReplicationId: "a renewal compares the replication id",
    RenewalSetsNothing: "a renewal does not create a missing key",
    RepairRaises: "a renewal never lowers the token of a key",
    NewTokenNamesToken: "a request for a new token compares the token, not only the lease id",
    NewTokenNeedsReplicationId: "a request for a new token compares the replication id",
    ReleaseOfAttempt: "a release compares the grant, not only the lease id",
    ReleaseOfToken: "a release compares the token, not only the attempt",
    ReleaseOfMark: "a release removes a higher token of its attempt only if the key has the mark",
    EndOfWhatWasFound: "a break compares the key that was read, not only the lease id",
    CleanUpOfRequest: "a clean-up compares the request of the key, not only the lease id",
    CleanUpOfMark: "a clean-up checks the mark, not whether the token is the proposal",
    CountOfMajority: "a process keeps in memory only a count that a majority has reached",
    NodesStandAlone: "no replica of a node is promoted",
}

impl Quorum {
    /// Returns the initial state.
    pub fn begin(&self) -> State {
        let mut state = State::new(self.nodes, self.has_counted);
        if self.first_is_granted {
            state = self.first_granted(state);
        }
        for node in &mut state.nodes {
            node.saved = Some(node.server).filter(|_| self.saved);
        }
        state
    }

    /// Returns the possible steps.
    pub fn steps(&self, state: &State) -> Vec<Step> {
        let mut steps = vec![];
        for (n, request) in self.requests.iter().enumerate() {
            self.request_steps(state, Of(n, *request), &mut steps);
        }
        for at in state.servers() {
            self.call_steps(state, at, &mut steps);
            self.fault_steps(state, at, &mut steps);
        }
        steps
    }
}

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
}

/// A set of nodes: their indices, as a bit set.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Nodes(pub u8);

impl Nodes {
    pub(super) fn has(self, place: usize) -> bool {
        self.0 & (1 << place) != 0
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
        write!(f, "{twin}node {}", self.node + 1)
    }
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nodes")?;
        let mut nodes = (0..8).filter(|node| self.has(*node));
        nodes.try_for_each(|node| write!(f, " {}", node + 1))
    }
}

impl Model for Quorum {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![self.begin()]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        steps.extend(self.steps(state));
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let (next, _) = self.step(state, step)?;
        Some(next).filter(|next| next != state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let (always, sometimes) = (Property::<Self>::always, Property::<Self>::sometimes);
        vec![
            always("no two leases have the same token", one_lease_a_token),
            always("a later grant has a higher token", tokens_go_up),
            always(
                "a superseded lease is not renewed",
                no_superseded_lease_is_renewed,
            ),
            always("only its own release removes a valid lease", |_, state| {
                !state.ended_live
            }),
            always(
                "a lease that a majority of the nodes stores is renewed",
                |_, state| !state.lost_live,
            ),
            sometimes("the last request is granted", |this, state| {
                state.requests[this.requests.len() - 1].granted.is_some()
            }),
            sometimes("a lease is granted after all restarts", |this, state| {
                let first = u8::from(this.has_counted);
                let restarts = this.most.restarts;
                let mut granted = state.requests.iter().filter_map(|request| request.granted);
                granted.any(|token| token.epoch >= first + restarts)
            }),
            sometimes("every renewal is confirmed", |this, state| {
                let mut renewals = state.renewals[..this.renewals.len()].iter();
                renewals.all(|renewal| renewal.renewed.is_some())
            }),
        ]
    }
}

/// Returns the tokens that were returned to clients, each with its lease and resource.
fn answered(world: &Quorum, state: &State) -> impl Iterator<Item = (u8, usize, Token)> {
    let requests = world.requests.iter().zip(state.requests);
    requests.filter_map(|(of, request)| Some((of.lease, of.resource, request.granted?)))
}

fn one_lease_a_token(world: &Quorum, state: &State) -> bool {
    let all = || answered(world, state);
    all().all(|(lease, resource, token)| {
        !all().any(|other| other.0 != lease && (other.1, other.2) == (resource, token))
    })
}

fn tokens_go_up(_: &Quorum, state: &State) -> bool {
    let requests = state.requests.iter().all(|request| {
        let (granted, before) = (request.granted, request.before);
        let is_higher =
            |(token, before): (Token, Before)| token >= before.own && token > before.others;
        granted.zip(before).is_none_or(is_higher)
    });
    let mut renewals = state.renewals.iter();
    requests
        && renewals.all(|renewal| {
            let renewed = renewal.renewed.zip(renewal.before);
            renewed.is_none_or(|(token, before)| token >= before.own)
        })
}

fn no_superseded_lease_is_renewed(_: &Quorum, state: &State) -> bool {
    let mut requests = state.requests.iter();
    let mut renewals = state.renewals.iter();
    requests.all(|request| {
        let renews_superseded = request
            .choice
            .is_some_and(|choice| choice.renews_superseded);
        !renews_superseded || request.granted.is_none()
    }) && renewals.all(|renewal| {
        let renewed = renewal.renewed.zip(renewal.before);
        renewed.is_none_or(|(token, before)| token.min(before.own) > before.others)
    })
}
