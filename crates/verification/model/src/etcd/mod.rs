//! Leases in etcd: transactions, etcd leases, and a status that shows whether etcd was restored.

mod bounds;
mod grant;
mod holder;
mod judge;
mod possible;
mod server;
mod state;
mod steps;

use std::fmt;

use stateright::{Model, Property};

use self::bounds::{Begins, Kind};
pub use self::{
    bounds::{Etcd, Request},
    state::State,
};
use crate::search::{promises, rules};

promises! {
    Etcd, |state| state.broken,
    Distinct: "no two leases have the same token",
    Later: "a later grant has a higher token",
    Renewed: "a superseded or released lease is not renewed",
    Stands: "a lease ends only if it expires or is released, or if etcd is restored",
    Released: "after a release is answered, the resource is free",
}

rules! {
    EtcdLeaseOfAttempt: "each attempt has an etcd lease with a random id",
    EtcdLeaseOnce: "a request that may have written the key reads it before it writes again",
    GiveUpOwn: "a request that gives up does not revoke an earlier etcd lease",
    RepeatMoves: "a repeated request moves the lease to its own etcd lease",
    CachedRow: "a grant requires the incarnation and the epoch of the cached row",
    Checked: "each grant is checked for a restore",
    StatusAfter: "the status is read after the transaction, not before it",
    LeadOfStatus: "the log is compared with the revision of the same status",
    FewEtcdLeases: "few etcd leases are created between a restore and the check",
    OneLateWrite: "of the calls that begin an epoch, at most one arrives a second time",
    NewEpoch: "a new epoch begins after a restore",
    EpochOnRow: "an epoch replaces only the row for which it was taken",
    OneIncarnation: "one key stores the incarnation and the lead; rows store no lead",
    RowNamesIncarnation: "a row is valid only in the incarnation that it names",
    RenewalReads: "a renewal reads the key after KeepAlive",
    RenewalChecked: "a renewal is checked for a restore",
    RenewalCounts: "a renewal requires the row from which its token was computed",
    ReleaseUnmoved: "a process removes an etcd lease from memory before it moves the key",
    NotFoundReads: "a release that finds no etcd lease reads the key",
    MoveRevokes: "a request that moves a lease is answered after the old etcd lease is revoked",
}

/// One step: a call of a request with its effect and its answer, or a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    LeaseGrant(Of),
    Txn(Of),
    /// The answer is lost, and the transaction is sent again.
    TxnWithoutAnswer(Of),
    Status(Of),
    /// The status is read before the transaction.
    StatusAhead(Of),
    WriteIncarnation(Of),
    TakeEpoch(Of),
    BeginEpoch(Of),
    RevokeOld(Of),
    ReadKey(Of),
    KeepAlive(Of),
    Revoke(Of),
    GiveUp(Of),
    LeaseGrantAgain(Of),
    TxnAgain(Of),
    WriteIncarnationAgain(Of),
    BeginEpochAgain(Of),
    RevokeAgain(Of),
    Expire(u8),
    Snapshot,
    Restore,
    /// Many leases of the second partition are granted and released.
    LeadGrows,
}

/// A request, with its index. In a counterexample, its text is its number, its kind, its lease and
/// its issuer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Of(pub usize, pub Request);

impl fmt::Debug for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(place, request) = self;
        let lease = char::from(b'a' + request.lease);
        let (number, issuer) = (place + 1, request.issuer + 1);
        write!(
            f,
            "{number}: {:?} of {lease} at issuer {issuer}",
            request.kind
        )
    }
}

impl Model for Etcd {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let mut state = State::new(self);
        if self.first_is_granted {
            let of = Of(0, self.requests[0]);
            for step in [Step::LeaseGrant(of), Step::Txn(of), Step::Status(of)] {
                state = self
                    .step(&state, step)
                    .expect("the first request can be granted");
            }
        }
        state.saved = Some(state.etcd).filter(|_| self.is_saved);
        vec![state]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for (place, request) in self.requests.iter().enumerate() {
            let of = Of(place, *request);
            self.request_steps(state, of, steps);
            self.late_copies(state, of, steps);
        }
        self.fault_steps(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        self.step(state, step).filter(|next| next != state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let sometimes = Property::<Self>::sometimes;
        let mut properties = Promise::properties();
        properties.push(sometimes("each request is answered", all_are_answered));
        if self.most.restores > 0 {
            properties.push(sometimes(
                "a lease is granted after the last restore",
                |world, state| {
                    let mut tokens = state.requests.iter().filter_map(|request| request.token);
                    let first = u8::from(world.begins != Begins::Empty);
                    let is_over = state.spent.restores == world.most.restores;
                    is_over && tokens.any(|token| token.epoch > first)
                },
            ));
        }
        properties
    }
}

fn all_are_answered(world: &Etcd, state: &State) -> bool {
    let requests = world.requests.iter().zip(&state.requests);
    let is_answered = |(request, progress): (&Request, &state::Progress)| match request.kind {
        Kind::Release => progress.stage == state::Stage::Done,
        _ => progress.token.is_some(),
    };
    requests.into_iter().all(is_answered)
}
