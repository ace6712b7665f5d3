//! The queue of waiters for a lease in Redis: [`Queue`].
//!
//! Two waiters use one issuer, and a third waiter uses another issuer. A client that is not in the
//! queue has the lease. The expiry of the lease does not wake any waiter. A release offers the
//! lease to the first waiter for a short time. The waiter confirms the offer if it retries within
//! that time.

use stateright::{Model, Property};

use crate::search::{World, rules};

rules! {
    IsWoken: "a waiter that is offered the lease is woken",
    Retries: "a waiter retries when the lease should have expired",
    JoinsAgain: "a waiter that is no longer in the queue joins it again",
    Lapses: "an unconfirmed offer expires soon",
}

const WAITERS: usize = 3;

pub const fn issuer_of(waiter: usize) -> usize {
    waiter / 2
}

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Waiter {
    #[default]
    New,
    Sleeps,
    Holds,
    /// The turn of the waiter is over.
    Done,
    /// The issuer of the waiter was killed, or the waiter has disconnected.
    Gone,
}

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Lease {
    Free,
    /// The client that has never waited has the lease.
    #[default]
    OfAnother,
    OfferedTo(usize),
    Of(usize),
}

#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct State {
    pub lease: Lease,
    pub queue: Vec<usize>,
    pub waiters: [Waiter; WAITERS],
    /// Whether a message to each waiter has been sent and has not arrived.
    pub messages: [bool; WAITERS],
    pub is_alive: [bool; 2],
    /// The issuer that was offered the lease and has not confirmed the offer.
    pub unconfirmed: Option<usize>,
    pub faults: u8,
    /// The number of leases that expired before the waiter confirmed the offer.
    pub lapsed: u8,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Step {
    Request(usize),
    /// A message arrives, and the waiter retries.
    IsWoken(usize),
    /// The waiter retries when the lease should have expired, or when the waiter is no longer in
    /// the queue.
    Retry(usize),
    Release,
    Expires,
    MessageIsLost(usize),
    IssuerIsKilled(usize),
    GoesAway(usize),
}

#[derive(Clone, Debug)]
pub struct Queue {
    /// The maximum total number of lost messages, killed issuers and waiters that disconnect.
    pub faults: u8,
    pub rules: Rules,
}

impl Queue {
    /// Lists the steps that need no fault.
    fn goes_on(&self, state: &State, steps: &mut Vec<Step>) {
        for waiter in 0..WAITERS {
            match state.waiters[waiter] {
                Waiter::New => steps.push(Step::Request(waiter)),
                Waiter::Sleeps => {
                    let is_out = !state.queue.contains(&waiter)
                        && state.lease != Lease::OfferedTo(waiter)
                        && self.rules.has(Rule::JoinsAgain);
                    let is_over = state.lease == Lease::Free && (is_out || !state.queue.is_empty());
                    if (is_over || is_out) && self.rules.has(Rule::Retries) {
                        steps.push(Step::Retry(waiter));
                    }
                }
                _ => {}
            }
            if state.messages[waiter] {
                steps.push(Step::IsWoken(waiter));
            }
        }
        match state.lease {
            Lease::Free => {}
            Lease::OfAnother => steps.extend([Step::Release, Step::Expires]),
            Lease::Of(waiter) => {
                if state.waiters[waiter] == Waiter::Holds {
                    steps.push(Step::Release);
                }
                steps.push(Step::Expires);
            }
            // A waiter that is woken confirms the offer before the offer expires.
            Lease::OfferedTo(waiter) => {
                if !state.messages[waiter] && self.rules.has(Rule::Lapses) {
                    steps.push(Step::Expires);
                }
            }
        }
    }

    fn offer(&self, state: &mut State) {
        if let Some(issuer) = state.unconfirmed.take() {
            for waiter in (0..WAITERS).filter(|waiter| issuer_of(*waiter) == issuer) {
                let sleeps = state.waiters[waiter] == Waiter::Sleeps;
                state.messages[waiter] |= sleeps && state.is_alive[issuer];
            }
            state.queue.retain(|waiter| issuer_of(*waiter) != issuer);
        }
        while !state.queue.is_empty() {
            let first = state.queue.remove(0);
            let issuer = issuer_of(first);
            if state.is_alive[issuer] {
                state.unconfirmed = Some(issuer);
                state.lease = Lease::OfferedTo(first);
                state.messages[first] = self.rules.has(Rule::IsWoken);
                return;
            }
        }
    }

    fn acquire(&self, state: &mut State, waiter: usize) {
        if state.lease == Lease::Free {
            self.offer(state);
        }
        let is_offered = state.lease == Lease::OfferedTo(waiter);
        if is_offered || state.lease == Lease::Free {
            state.queue.retain(|other| *other != waiter);
            if is_offered {
                state.unconfirmed = None;
            }
            state.lease = Lease::Of(waiter);
            state.waiters[waiter] = Waiter::Holds;
            return;
        }
        if !state.queue.contains(&waiter) {
            state.queue.push(waiter);
        }
        state.waiters[waiter] = Waiter::Sleeps;
    }

    fn end(&self, state: &mut State) {
        if let Lease::Of(waiter) = state.lease
            && state.waiters[waiter] == Waiter::Holds
        {
            state.waiters[waiter] = Waiter::Done;
        }
        state.lease = Lease::Free;
    }
}

impl World for Queue {
    type Rule = Rule;
    const NAME: &'static str = "The queue of waiters";
    const RULES: &'static [Rule] = Rule::ALL;

    fn worlds() -> Vec<Self> {
        let within = |faults| Self {
            faults,
            rules: Rules::default(),
        };
        vec![within(0), within(2)]
    }

    fn in_bounds_of(_: Rule) -> Self {
        Self {
            faults: 2,
            rules: Rules::default(),
        }
    }

    fn leave_out(mut self, rule: Rule) -> Self {
        self.rules = Rules::without(rule);
        self
    }
}

impl Model for Queue {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            is_alive: [true; 2],
            ..State::default()
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        self.goes_on(state, steps);
        if state.faults == self.faults {
            return;
        }
        for waiter in 0..WAITERS {
            if state.messages[waiter] {
                steps.push(Step::MessageIsLost(waiter));
            }
            if state.waiters[waiter] == Waiter::Sleeps {
                steps.push(Step::GoesAway(waiter));
            }
        }
        let alive = (0..2).filter(|issuer| state.is_alive[*issuer]);
        steps.extend(alive.map(Step::IssuerIsKilled));
    }

    fn next_state(&self, before: &State, step: Step) -> Option<State> {
        let mut state = before.clone();
        match step {
            Step::Request(waiter) => self.acquire(&mut state, waiter),
            Step::IsWoken(waiter) => {
                state.messages[waiter] = false;
                if state.waiters[waiter] == Waiter::Sleeps {
                    self.acquire(&mut state, waiter);
                }
            }
            Step::Retry(waiter) => {
                if state.queue.contains(&waiter) || self.rules.has(Rule::JoinsAgain) {
                    self.acquire(&mut state, waiter);
                } else if state.lease == Lease::Free {
                    self.offer(&mut state);
                }
            }
            Step::Release => {
                self.end(&mut state);
                self.offer(&mut state);
            }
            Step::Expires => {
                state.lapsed += u8::from(matches!(state.lease, Lease::OfferedTo(_)));
                self.end(&mut state);
            }
            Step::MessageIsLost(waiter) => {
                state.faults += 1;
                state.messages[waiter] = false;
            }
            Step::IssuerIsKilled(issuer) => {
                state.faults += 1;
                state.is_alive[issuer] = false;
                for waiter in (0..WAITERS).filter(|waiter| issuer_of(*waiter) == issuer) {
                    state.messages[waiter] = false;
                    if state.waiters[waiter] != Waiter::Done {
                        state.waiters[waiter] = Waiter::Gone;
                    }
                }
            }
            Step::GoesAway(waiter) => {
                state.faults += 1;
                state.waiters[waiter] = Waiter::Gone;
                state.messages[waiter] = false;
                state.queue.retain(|other| *other != waiter);
                if state.lease == Lease::OfferedTo(waiter) {
                    state.lease = Lease::Free;
                    state.unconfirmed = None;
                    self.offer(&mut state);
                }
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let (always, sometimes) = (Property::<Self>::always, Property::<Self>::sometimes);
        vec![
            always("every waiter gets its turn", |world, state| {
                let mut steps = vec![];
                world.goes_on(state, &mut steps);
                !steps.is_empty() || !state.waiters.contains(&Waiter::Sleeps)
            }),
            always("without a fault, no offer expires", |_, state| {
                state.lapsed <= state.faults
            }),
            sometimes("every waiter has had its turn", |_, state| {
                state.waiters == [Waiter::Done; WAITERS]
            }),
            sometimes(
                "an issuer with two waiters is killed, and the third waiter has its turn",
                |world, state| {
                    let (gone, done) = (Waiter::Gone, Waiter::Done);
                    world.faults == 0 || state.waiters == [gone, gone, done]
                },
            ),
        ]
    }
}
