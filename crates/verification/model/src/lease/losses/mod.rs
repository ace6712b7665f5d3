//! A lease store and the source of its epochs, both of which may lose data. Grants are not
//! announced, so the store alone determines the tokens.

mod alone;
mod bounds;
mod database;
mod loss;
mod request;
pub mod server;
pub mod state;

use stateright::{Model, Property};

use self::state::{HOLDERS, Holder, Kind, Of, State};

pub use self::{bounds::Losses, loss::Loss};
use crate::search::{promises, rules};

promises! {
    Losses, |state| state.past.broken,
    Distinct: "no two leases have the same token",
    Later: "a later grant has a higher token",
    Superseded: "a deposed master grants no token above those of the new master",
    StaysSuperseded: "a superseded lease is not renewed",
    Stands: "a lease ends only if it expires or is released, or if data is lost",
    OwnEpochs: "an issuer uses only epochs of its own database",
}

rules! {
    Epoch: "a token contains an epoch",
    ReplicationId: "a counter is valid only under the replication id that it contains",
    Incarnation: "an epoch begins only on the blank counter for which it was taken",
    AboveTheCounter: "an epoch begins only on a counter with a lower epoch",
    NotAhead: "an epoch is taken when it is needed, not in advance",
    EndOfNumbers: "a new epoch begins when the numbers of an epoch are used up",
    Durable: "an epoch is on disk before it is used",
    ReReported: "issuers re-report epochs to the database",
    Again: "issuers re-report epochs every minute, not only once",
    MoveUp: "the database skips epochs after its timeline has changed",
    Memory: "an issuer keeps the highest count of a partition in memory",
    FindMaster: "an issuer looks up the master again before it replaces a counter",
    BeginsAbove: "a counter below the highest count that the issuer has seen is replaced",
    LeaseOfACounter: "a stored lease is valid only if the counter is valid",
    LeaseOfTheEpoch: "a stored lease is valid only in the epoch of the counter",
    Source: "a counter belongs to one source of epochs",
    RenewCompares: "a renewal compares the lease id",
    ReleaseCompares: "a release compares the lease id",
}

/// The maximum number of reconnections of issuers after a promotion.
const RECONNECTS: u8 = 2;

impl Losses {
    /// Returns the resource of a lease.
    fn resource(&self, id: u8) -> usize {
        usize::from(self.apart && usize::from(id) + 1 == self.holders)
    }

    /// Whether two leases have the same resource and the same fence, which compares their tokens.
    fn compare(&self, one: u8, other: u8) -> bool {
        self.resource(one) == self.resource(other)
            && self.application(one) == self.application(other)
    }

    /// Whether two holders are interchangeable.
    fn are_alike(&self, one: usize, other: usize) -> bool {
        let id = |holder| u8::try_from(holder).expect("there are few holders");
        self.compare(id(one), id(other))
    }

    /// Returns the application of an issuer or a holder.
    fn application(&self, number: u8) -> usize {
        usize::from(number) % self.applications
    }
}

/// A step of a holder, an issuer, a server or the database.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// A holder sends a request to this issuer.
    Ask(Kind, Of, u8),
    /// The caller disconnects, and the request continues.
    Abandon(Of),
    ScriptRuns(Of),
    EpochIsTaken(Of),
    EpochBegins(Of),
    MasterIsFoundAgain(Of),
    IsAnswered(Of),
    LeaseExpires {
        server: u8,
        resource: usize,
    },
    /// An issuer reconnects, and may find either server.
    Reconnects {
        issuer: u8,
    },
    /// Redis saves its file, or the replica starts to lag.
    RedisIsSaved,
    /// The standby of the database stops replicating.
    StandbyFallsBehind,
    /// Issuers report their epochs to the database.
    AMinutePasses,
    Lose(Loss),
}

impl Model for Losses {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State::default()]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for place in 0..=HOLDERS {
            if let Some(request) = &state.requests[place] {
                steps.push(Self::goes_on(Of(place), request));
                let is_free = state.requests[HOLDERS].is_none();
                if place < HOLDERS && is_free && state.abandoned < self.abandoned {
                    steps.push(Step::Abandon(Of(place)));
                }
            }
        }
        for holder in 0..self.holders {
            // Interchangeable holders begin in order.
            if holder > 0
                && state.holders[holder - 1] == Holder::New
                && self.are_alike(holder - 1, holder)
            {
                continue;
            }
            if state.requests[holder].is_none() {
                self.asks(state, holder, steps);
            }
        }
        for (number, server) in (0..).zip(&state.servers) {
            for (resource, lease) in server.keys.leases.iter().enumerate() {
                if lease.is_some() {
                    steps.push(Step::LeaseExpires {
                        server: number,
                        resource,
                    });
                }
            }
        }
        if state.master == 1 && state.reconnects < RECONNECTS {
            let issuers = 0..u8::try_from(self.issuers).expect("there are few issuers");
            let free = issuers.filter(|issuer| !state.has_epoch(*issuer));
            steps.extend(free.map(|issuer| Step::Reconnects { issuer }));
        }
        self.losses(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut state = state.clone();
        match step {
            Step::Ask(kind, holder, issuer) => self.ask(&mut state, holder, issuer, kind),
            Step::Abandon(of) => {
                state.abandoned += 1;
                state.requests[HOLDERS] = state.requests[of.0].take();
            }
            Step::ScriptRuns(of)
            | Step::EpochIsTaken(of)
            | Step::EpochBegins(of)
            | Step::MasterIsFoundAgain(of)
            | Step::IsAnswered(of) => self.go_on(&mut state, of),
            Step::LeaseExpires { server, resource } => {
                let server = &mut state.servers[usize::from(server)];
                let lease = server.keys.leases[resource]
                    .take()
                    .expect("the resource has a lease");
                state.past.ended |= 1 << lease.id;
            }
            Step::Reconnects { issuer } => {
                state.reconnects += 1;
                let server = &mut state.issuers[usize::from(issuer)].server;
                *server = 1 - *server;
            }
            Step::RedisIsSaved | Step::StandbyFallsBehind | Step::AMinutePasses | Step::Lose(_) => {
                self.lose(&mut state, step)
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let (always, sometimes) = (Property::<Self>::always, Property::<Self>::sometimes);
        let mut properties = Promise::properties();
        properties.extend([
            always(
                "no request is refused while all servers answer",
                |world, state| world.answers_who_is_alone(state),
            ),
            sometimes("every holder was granted its lease", |world, state| {
                let holders = 0..u8::try_from(world.holders).expect("there are few holders");
                holders.into_iter().all(|id| state.past.was_granted(id))
            }),
        ]);
        if self.most > 0 {
            let after = |world: &Self, state: &State| {
                let last = state.past.answered.last();
                state.losses == world.most && last.is_some_and(|(_, id)| *id > 0)
            };
            properties.push(sometimes("a lease is granted after the last loss", after));
        }
        properties
    }
}
