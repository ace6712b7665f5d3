//! Holders that read, think and write, on one resource: [`Writes`].
//!
//! A step is what the database does at once: a statement under its row locks, or a COMMIT. Between two steps anybody
//! else may take any number of steps, which is also how a process is paused.

mod rules;
mod state;
mod steps;

use stateright::{Model, Property};

pub use self::{
    rules::Rule,
    state::{
        Attempt, Data, Database, FORGED, Faults, Holder, Mode, Request, Row, Stage, State, Verdict,
        Who,
    },
    steps::Step,
};
use crate::search::World;

/// Each way to go about it, at the same bounds.
pub struct Writes {
    pub holders: usize,
    pub faults: Faults,
    pub modes: Vec<Mode>,
    /// Whoever writes locks the whole database, as in SQLite.
    pub one_writer: bool,
    pub missing: Option<Rule>,
}

impl Writes {
    /// The bounds of the table.
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
            missing: None,
        }
    }

    /// Three holders.
    pub fn large() -> Self {
        Self {
            holders: 3,
            ..Self::small()
        }
    }

    pub(crate) fn follows(&self, rule: Rule) -> bool {
        self.missing != Some(rule)
    }
}

impl World for Writes {
    type Rule = Rule;
    const NAME: &'static str = "The fence";
    const RULES: &'static [Rule] = Rule::ALL;

    /// Of the ways to go about it those in which the rule alone is missed.
    fn without(rule: Rule) -> Self {
        let mut world = Self {
            missing: Some(rule),
            ..Self::small()
        };
        match rule {
            Rule::OneTransaction => {
                world.faults = Faults::NONE;
                world.modes.retain(|mode| !mode.at_once);
            }
            Rule::Newer => world
                .modes
                .retain(|mode| !mode.announced && !mode.writes_back),
            Rule::NewVersion => world.modes.retain(|mode| !mode.at_once),
            Rule::Guard => world.modes.retain(|mode| mode.single_use),
            _ => {}
        }
        world
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
        vec![
            Property::always("a success has its commit", |_, state: &State| {
                all(state, |who, holder| {
                    !is_answered(holder) || state.commits_of(who) > 0
                })
            }),
            Property::always("a single-use token writes once", |_, state: &State| {
                !state.mode.single_use || all(state, |who, _| state.commits_of(who) <= 1)
            }),
            Property::always(
                "every acknowledged write is there exactly once",
                |_, state: &State| {
                    all(state, |who, holder| {
                        !is_answered(holder) || state.changes_of(who) == 1
                    })
                },
            ),
            Property::always(
                "a write without a verdict is there at most once",
                |_, state: &State| all(state, |who, _| state.changes_of(who) <= 1),
            ),
            Property::always(
                "a committed write is never written over",
                |_, state: &State| {
                    all(state, |who, _| {
                        state.changes_of(who) >= state.commits_of(who)
                    })
                },
            ),
            Property::always("once answered, older is dead", |_, state: &State| {
                !state.older_wrote
            }),
            Property::always(
                "a holder is refused for a newer one only",
                |_, state: &State| !state.refused_for_nothing,
            ),
            Property::sometimes("each holder has written", |world: &Self, state: &State| {
                let mut holders = Who::HOLDERS[..world.holders].iter();
                holders.all(|who| state.holder(*who).verdict == Verdict::Done)
            }),
            Property::sometimes("an older holder is refused", |_, state: &State| {
                state.holder(Who::A).verdict == Verdict::Refused
            }),
            Property::sometimes(
                "a failed write is repeated and done",
                |world, state: &State| {
                    world.faults.failures + world.faults.repetitions < 2
                        || state.left.failures == 0
                            && state.attempt(Who::A, Request::First) == Attempt::Over
                            && state.holder(Who::A).verdict == Verdict::Done
                            && state.left.repetitions == 0
                },
            ),
            Property::sometimes(
                "a write is lost in a failover, and another is done after it",
                |world, state: &State| {
                    world.faults.failovers == 0
                        || state.holder(Who::A).verdict == Verdict::Lost
                            && state.holder(Who::B).verdict == Verdict::Done
                },
            ),
        ]
    }
}

fn all(state: &State, holds: impl Fn(Who, &Holder) -> bool) -> bool {
    let mut holders = Who::HOLDERS.iter();
    holders.all(|who| holds(*who, state.holder(*who)))
}

/// Whether a success was answered, and nothing is under way that it may stand for.
fn is_answered(holder: &Holder) -> bool {
    let is_under_way = |attempt| matches!(attempt, Attempt::Written(_));
    holder.verdict == Verdict::Done && !holder.attempts.into_iter().any(is_under_way)
}
