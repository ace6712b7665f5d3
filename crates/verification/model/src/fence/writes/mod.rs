//! Holders that read, compute and write on one resource: [`Writes`].
//!
//! A step is one statement under its row locks, or one COMMIT. Between two steps of a holder, every
//! other client may take any number of steps. A client that takes no steps is paused.

mod state;
mod steps;

use stateright::{Model, Property};

pub use self::{
    state::{
        Attempt, Data, Database, FORGED, Faults, Holder, MOVE, Mode, Request, Row, Stage, State,
        Verdict, Who,
    },
    steps::Step,
};
use crate::search::{World, rules};

rules! {
    OneTransaction: "the check and the write are in one transaction",
    OneStatement: "one statement compares a token with `max_token` and updates `max_token`",
    Newer: "an admitted token is above `max_token`, not equal to it",
    Announcement: "a grant is announced before it is answered",
    FencedRead: "a read is fenced like a write",
    ReadLocks: "a fenced read locks the row from its admission to its COMMIT",
    ReadCommits: "a fenced read is answered after its COMMIT",
    ReadLeavesToken: "a fenced read leaves its own token valid",
    NoticesFailover: "an admission detects a failover",
    NewVersion: "a write creates a new version of the row even if `max_token` stays the same",
    NeverBack: "a raise never lowers `max_token`",
    OneBelow: "a raise leaves its own token valid",
    RaiseAfterFailure: "after a handler has failed, the fence is raised before the answer",
    Rejected: "a rejected request does not raise the fence",
    GoneAway: "a client that disconnects leaves no open transaction",
    CommitBeforeAnswer: "a success is reported only after its COMMIT",
    AbortedIsFound: "an aborted transaction is not reported as a success",
    UnknownIsNoSuccess: "an unconfirmed COMMIT is not reported as a success",
    Guard: "a single statement checks that the row has not changed since its snapshot",
    GuardByVersion: "a single statement compares the version of the row, not `max_token`",
    MoveAfterFailover: "after a failover, all earlier tokens are stale",
}

/// A world with the same bounds for each of its modes.
#[derive(Clone, Debug)]
pub struct Writes {
    pub holders: usize,
    pub faults: Faults,
    pub modes: Vec<Mode>,
    /// Whether a write locks the whole database, as in SQLite.
    pub one_writer: bool,
    pub rules: Rules,
}

impl Writes {
    /// Bounds with two holders, all modes, and one fault of each kind.
    pub fn small() -> Self {
        Self {
            holders: 2,
            faults: Faults {
                repetitions: 1,
                failures: 1,
                crashes: 1,
                failovers: 1,
                strangers: 1,
            },
            modes: Mode::all().collect(),
            one_writer: false,
            rules: Rules::default(),
        }
    }

    /// Bounds with three holders, one of which sends two requests, a handler that fails, and a
    /// failover.
    pub fn large() -> Self {
        Self {
            holders: 3,
            faults: Faults {
                repetitions: 1,
                failures: 1,
                failovers: 1,
                ..Faults::default()
            },
            ..Self::small()
        }
    }

    /// Returns one world for each mode.
    fn parts(self) -> Vec<Self> {
        let alone = |mode: &Mode| Self {
            modes: vec![*mode],
            ..self.clone()
        };
        self.modes.iter().map(alone).collect()
    }
}

impl World for Writes {
    type Rule = Rule;
    const NAME: &'static str = "The fence";
    const RULES: &'static [Rule] = Rule::ALL;

    fn worlds() -> Vec<Self> {
        Self::small().parts()
    }

    fn large_worlds() -> Vec<Self> {
        Self::large().parts()
    }

    /// Keeps only the modes in which a promise breaks without this rule.
    fn in_bounds_of(rule: Rule) -> Self {
        let mut world = Self::small();
        match rule {
            Rule::OneTransaction => {
                world.faults = Faults::default();
                world.modes.retain(|mode| !mode.at_once);
            }
            Rule::Newer => world
                .modes
                .retain(|mode| !mode.announced && !mode.writes_back),
            Rule::Guard => world.modes.retain(|mode| mode.single_use),
            Rule::MoveAfterFailover => world.modes.retain(|mode| mode.announced),
            _ => {}
        }
        world
    }

    fn leave_out(mut self, rule: Rule) -> Self {
        self.rules = Rules::without(rule);
        self
    }
}

impl Model for Writes {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let modes = self.modes.iter();
        modes.map(|mode| State::new(*mode, self.faults)).collect()
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        self.possible(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        Some(self.take(state, step))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let (always, sometimes) = (Property::<Self>::always, Property::<Self>::sometimes);
        vec![
            always("each reported success was committed", |_, state| {
                all(state, |write| !write.is_answered || write.commits > 0)
            }),
            always(
                "a client writes at most once under a single-use token",
                |_, state| !state.mode.single_use || all(state, |write| write.commits <= 1),
            ),
            always(
                "an acknowledged write is present exactly once",
                |_, state| all(state, |write| !write.is_answered || write.changes == 1),
            ),
            always("an unanswered write is present at most once", |_, state| {
                all(state, |write| write.changes <= 1)
            }),
            always(
                "a committed write is not overwritten from an older read",
                |_, state| all(state, |write| write.changes >= write.commits),
            ),
            always(
                "after an answer under a token, older tokens are stale",
                |_, state| !state.older_admitted,
            ),
            always(
                "a holder is refused only because of a newer grant or a used token",
                |_, state| !state.refused_for_nothing,
            ),
            always(
                "no client waits for a request that has ended",
                |_, state| !state.waits_forever(),
            ),
            sometimes("each holder has written", |world, state| {
                let mut holders = Who::HOLDERS[..world.holders].iter();
                holders.all(|who| state.holder(*who).verdicts[0] == Verdict::Done)
            }),
            sometimes("an older holder is refused", |_, state| {
                state.holder(Who::A).verdicts.contains(&Verdict::Refused)
            }),
            sometimes(
                "a client writes again under a reusable token",
                |world, state| {
                    state.mode.single_use
                        || world.faults.repetitions == 0
                        || state.holder(Who::A).verdicts == [Verdict::Done; 2]
                },
            ),
            sometimes(
                "a write succeeds after a failed write under the same token",
                |world, state| {
                    world.faults.failures + world.faults.repetitions < 2 || a_second_is_done(state)
                },
            ),
            sometimes(
                "a failover loses a write, and a later write succeeds",
                |world, state| {
                    world.faults.failovers == 0
                        || state.holder(Who::A).verdicts[0] == Verdict::Lost
                            && state.holder(Who::B).verdicts[0] == Verdict::Done
                },
            ),
        ]
    }
}

/// Whether the first request of A was answered with a failure, and the COMMIT of the second one is
/// confirmed.
fn a_second_is_done(state: &State) -> bool {
    state.holder(Who::A).verdicts[0] == Verdict::Failed
        && state.attempt(Who::A, Request::Again) == Attempt::Committed
}

/// The effects of a write.
struct Write {
    /// A success was answered, and no transaction of the write is open.
    is_answered: bool,
    commits: u8,
    changes: u8,
}

fn all(state: &State, holds: impl Fn(Write) -> bool) -> bool {
    let writes = Who::HOLDERS.into_iter();
    let mut writes = writes.flat_map(|who| [0, 1].map(|write| (who, write)));
    writes.all(|(who, write)| {
        let holder = state.holder(who);
        let is_under_way = |attempt| matches!(attempt, Attempt::Written(_));
        let is_answered = holder.verdicts[write] == Verdict::Done
            && !holder.attempts.into_iter().any(is_under_way);
        let place = State::place(who, write);
        holds(Write {
            is_answered,
            commits: state.commits[place],
            changes: state.committed.data[place],
        })
    })
}
