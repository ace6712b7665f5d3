//! Writes to several resources in one transaction: [`Several`].
//!
//! Each of two requests moves an amount from one resource to the other. The requests name the
//! resources in opposite orders. An older holder writes only to the first resource, and a newer
//! holder only to the second.

use stateright::{Model, Property};

use crate::search::{World, rules};

rules! {
    OneOrder: "all transactions lock rows in the same order",
    AllOrNone: "one stale token refuses the whole write",
    EachIsRaised: "if the token of one raise is stale, the other raises are still made",
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    R,
    S,
}

use Resource::{R, S};

/// The holders, ordered by their tokens.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Who {
    Older,
    A,
    B,
    Newer,
}

impl Who {
    pub const ALL: [Self; 4] = [Self::Older, Self::A, Self::B, Self::Newer];

    pub const fn token(self) -> u8 {
        self as u8 + 1
    }

    /// Returns the resources of the holder's request, in the order in which the request names them.
    pub const fn resources(self) -> &'static [Resource] {
        match self {
            Self::Older => &[R],
            Self::A => &[R, S],
            Self::B => &[S, R],
            Self::Newer => &[S],
        }
    }
}

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Attempt {
    #[default]
    None,
    /// The request is in progress: the number of rows that it has read, and the rows that it has
    /// locked.
    Admitting(usize, [bool; 2]),
    /// The transaction of the request is rolled back. The fence is raised before the answer.
    Failing,
    Over,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Step {
    Begin(Who),
    /// The next row is admitted, or the request is refused.
    Admit(Who, Resource),
    Commit(Who),
    Fail(Who),
    AnswerFailure(Who),
}

#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct State {
    pub max_token: [u8; 2],
    /// The amount of each resource.
    pub amounts: [u8; 2],
    pub attempts: [Attempt; 4],
    /// For each resource, the highest token under which a request was answered.
    pub answered: [u8; 2],
    pub older_wrote: bool,
    pub failures: u8,
    pub transfers: u8,
    pub refused: bool,
}

#[derive(Clone, Debug)]
pub struct Several {
    pub failures: u8,
    pub rules: Rules,
}

impl Several {
    pub fn small() -> Self {
        Self {
            failures: 1,
            rules: Rules::default(),
        }
    }

    /// Returns the row that a request locks next, after it has locked this number of rows.
    fn next(&self, who: Who, locked: usize) -> Option<Resource> {
        let mut resources = who.resources().to_vec();
        if self.rules.has(Rule::OneOrder) {
            resources.sort();
        }
        resources.get(locked).copied()
    }

    /// Returns the holder for whose lock a request waits.
    fn waits_for(&self, state: &State, who: Who) -> Option<Who> {
        let Attempt::Admitting(locked, _) = state.attempts[who as usize] else {
            return None;
        };
        let next = self.next(who, locked)?;
        let mut others = Who::ALL.into_iter().filter(|other| *other != who);
        others.find(|other| has(state, *other, next))
    }
}

impl World for Several {
    type Rule = Rule;
    const NAME: &'static str = "Several resources";
    const RULES: &'static [Rule] = Rule::ALL;

    fn worlds() -> Vec<Self> {
        vec![Self::small()]
    }

    fn in_bounds_of(_: Rule) -> Self {
        Self::small()
    }

    fn leave_out(mut self, rule: Rule) -> Self {
        self.rules = Rules::without(rule);
        self
    }
}

impl Model for Several {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            amounts: [2; 2],
            failures: self.failures,
            ..State::default()
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for who in Who::ALL {
            match state.attempts[who as usize] {
                Attempt::None => steps.push(Step::Begin(who)),
                Attempt::Admitting(locked, _) => match self.next(who, locked) {
                    Some(next) if self.waits_for(state, who).is_none() => {
                        steps.push(Step::Admit(who, next));
                    }
                    Some(_) => {}
                    None => {
                        steps.push(Step::Commit(who));
                        if state.failures > 0 {
                            steps.push(Step::Fail(who));
                        }
                    }
                },
                Attempt::Failing => {
                    let mut resources = who.resources().iter();
                    let free = |resource: &Resource| {
                        !Who::ALL
                            .into_iter()
                            .any(|other| has(state, other, *resource))
                    };
                    if resources.all(free) {
                        steps.push(Step::AnswerFailure(who));
                    }
                }
                Attempt::Over => {}
            }
        }
    }

    fn next_state(&self, before: &State, step: Step) -> Option<State> {
        let mut state = before.clone();
        match step {
            Step::Begin(who) => state.attempts[who as usize] = Attempt::Admitting(0, [false; 2]),
            Step::Admit(who, resource) => {
                let Attempt::Admitting(locked, mut has) = before.attempts[who as usize] else {
                    return None;
                };
                let is_alive = who.token() > before.max_token[resource as usize];
                state.attempts[who as usize] = if is_alive || !self.rules.has(Rule::AllOrNone) {
                    has[resource as usize] = is_alive;
                    Attempt::Admitting(locked + 1, has)
                } else {
                    state.refused = true;
                    Attempt::Over
                };
            }
            Step::Commit(who) => {
                let Attempt::Admitting(_, admitted) = before.attempts[who as usize] else {
                    return None;
                };
                state.attempts[who as usize] = Attempt::Over;
                for resource in [R, S] {
                    if admitted[resource as usize] {
                        write(&mut state, who, resource);
                    }
                }
                state.transfers += u8::from(who.resources().len() == 2);
            }
            Step::Fail(who) => {
                state.failures -= 1;
                state.attempts[who as usize] = Attempt::Failing;
            }
            Step::AnswerFailure(who) => {
                state.attempts[who as usize] = Attempt::Over;
                let late =
                    |resource: &Resource| before.max_token[*resource as usize] >= who.token();
                let any_late = who.resources().iter().any(late);
                for resource in who.resources() {
                    let place = *resource as usize;
                    if !any_late || self.rules.has(Rule::EachIsRaised) {
                        state.max_token[place] = before.max_token[place].max(who.token() - 1);
                    }
                    state.answered[place] = before.answered[place].max(who.token());
                }
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let (always, sometimes) = (Property::<Self>::always, Property::<Self>::sometimes);
        vec![
            always(
                "a transfer is written completely or not at all",
                |_, state| state.amounts.iter().sum::<u8>() == 4,
            ),
            always("no two transactions wait for each other", |world, state| {
                !Who::ALL.into_iter().any(|who| {
                    let other = world.waits_for(state, who);
                    other.and_then(|other| world.waits_for(state, other)) == Some(who)
                })
            }),
            always(
                "after an answer under a token, older tokens are stale",
                |_, state| !state.older_wrote,
            ),
            sometimes("both transfers are written", |_, state| {
                state.transfers == 2
            }),
            sometimes("one stale token refuses a whole transfer", |_, state| {
                state.refused
            }),
        ]
    }
}

/// Whether the transaction of a request has locked a row.
fn has(state: &State, who: Who, resource: Resource) -> bool {
    match state.attempts[who as usize] {
        Attempt::Admitting(_, has) => has[resource as usize],
        _ => false,
    }
}

fn write(state: &mut State, who: Who, resource: Resource) {
    let place = resource as usize;
    state.older_wrote |= who.token() < state.answered[place];
    state.max_token[place] = who.token();
    state.answered[place] = state.answered[place].max(who.token());
    match (who.resources(), resource) {
        ([from, _], _) if *from == resource => state.amounts[place] -= 1,
        ([_, _], _) => state.amounts[place] += 1,
        // A request for only one resource does not change the amounts.
        _ => {}
    }
}
