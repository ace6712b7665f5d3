//! Depth-first search of large worlds. The search stores one 64-bit hash of each state, so it can
//! search worlds for which a breadth-first search would run out of memory. Its counterexamples are
//! not always the shortest.
//!
//! Two states with the same hash count as one state, as in other checkers. Among 10⁸ states, the
//! probability of such a collision is 1 in 3,700.

use std::{
    collections::HashSet,
    fmt,
    hash::{BuildHasherDefault, Hash, Hasher},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use ahash::RandomState;
use stateright::{Expectation, Model, Property};

use crate::search::{World, format_steps, print};

/// The number of concurrent searches. Each search starts from states of its own.
const THREADS: usize = 2;

/// The minimum number of states from which the threads start.
const BEGINNINGS: usize = 4096;

/// Searches whole worlds, and returns the number of states of each. Every promise must hold, and
/// each possible outcome must be reached in each world.
pub fn hold<W: World>(worlds: Vec<W>) -> Vec<usize> {
    let hold_in = |world: W| {
        let searched = search(&world).unwrap_or_else(|broken| panic!("{}: {broken}", W::NAME));
        if let Some(end) = searched.never {
            panic!("{}: not reached: {end}", W::NAME);
        }
        let states = searched.states;
        print(&format!(
            "{}: {states} states, every promise holds",
            W::NAME
        ));
        states
    };
    worlds.into_iter().map(hold_in).collect()
}

/// The result of a search of a world whose promises hold.
pub struct Searched {
    pub states: usize,
    /// The first state that should be reachable but was not reached, if any.
    pub never: Option<&'static str>,
}

/// A broken promise, and the steps that break it.
#[derive(Debug, thiserror::Error)]
#[error("broken promise: {promise}, after\n{}", format_steps(steps))]
pub struct Broken<A: fmt::Debug> {
    pub promise: &'static str,
    pub steps: Vec<A>,
}

/// Searches a whole world, or until a promise is broken.
///
/// # Errors
///
/// The broken promise, and the steps that break it.
pub fn search<W: World>(world: &W) -> Result<Searched, Broken<W::Action>> {
    let search = Search::new(world);
    search.run();
    if let Some(broken) = search
        .broken
        .into_inner()
        .expect("no thread panicked with the lock")
    {
        return Err(broken);
    }
    let mut ends = search.properties.iter().zip(&search.reached);
    let never = ends.find(|(property, reached)| {
        property.expectation == Expectation::Sometimes && !reached.load(Relaxed)
    });
    Ok(Searched {
        states: search.seen.len(),
        never: never.map(|(property, _)| property.name),
    })
}

struct Search<'a, W: World> {
    world: &'a W,
    properties: Vec<Property<W>>,
    /// Whether each property was true in some state.
    reached: Vec<AtomicBool>,
    seen: Seen,
    /// The states from which no thread has continued yet, with the steps that lead to them.
    beginnings: Mutex<Vec<Beginning<W>>>,
    broken: Mutex<Option<Broken<W::Action>>>,
    is_over: AtomicBool,
}

/// A state, and the steps that lead to it.
type Beginning<W> = (<W as Model>::State, Vec<<W as Model>::Action>);

impl<'a, W: World> Search<'a, W> {
    fn new(world: &'a W) -> Self {
        let properties = world.properties();
        Self {
            world,
            reached: properties.iter().map(|_| AtomicBool::new(false)).collect(),
            properties,
            seen: Seen::default(),
            beginnings: Mutex::default(),
            broken: Mutex::default(),
            is_over: AtomicBool::new(false),
        }
    }

    fn run(&self) {
        *self
            .beginnings
            .lock()
            .expect("no thread panicked with the lock") = self.breadth_first();
        let next = || {
            self.beginnings
                .lock()
                .expect("no thread panicked with the lock")
                .pop()
        };
        let go_on = || {
            while let Some((state, steps)) = next() {
                self.depth_first(state, steps);
            }
        };
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(go_on);
            }
        });
    }

    /// Returns the first states, from which the depth-first searches start.
    fn breadth_first(&self) -> Vec<Beginning<W>> {
        let init = self.world.init_states().into_iter();
        let mut states: Vec<_> = init
            .filter(|state| self.is_new(state, Vec::new))
            .map(|state| (state, vec![]))
            .collect();
        while !states.is_empty() && states.len() < BEGINNINGS {
            let mut next = vec![];
            for (state, steps) in &states {
                for step in self.steps(state) {
                    let lead = || [steps.as_slice(), std::slice::from_ref(&step)].concat();
                    if let Some(state) = self.take(state, &step, lead) {
                        next.push((state, lead()));
                    }
                }
            }
            states = next;
        }
        states
    }

    fn depth_first(&self, state: W::State, lead: Vec<W::Action>) {
        let steps = self.steps(&state);
        // Each state is stored with its remaining steps. The last of these steps leads to the next
        // state on the stack.
        let mut stack = vec![(state, steps)];
        while let Some((state, steps)) = stack.last() {
            let Some(step) = steps.last() else {
                stack.pop();
                if let Some((_, steps)) = stack.last_mut() {
                    steps.pop();
                }
                continue;
            };
            let taken = || {
                let below = stack.iter().filter_map(|(_, steps)| steps.last());
                lead.iter().chain(below).cloned().collect()
            };
            match self.take(state, step, taken) {
                Some(next) => {
                    let steps = self.steps(&next);
                    stack.push((next, steps));
                }
                None => drop(stack.last_mut().map(|(_, steps)| steps.pop())),
            }
        }
    }

    /// Returns the possible steps. After a promise is broken, there are none.
    fn steps(&self, state: &W::State) -> Vec<W::Action> {
        let mut steps = vec![];
        if !self.is_over.load(Relaxed) {
            self.world.actions(state, &mut steps);
        }
        steps
    }

    /// Returns the state after a step, unless the state is known.
    fn take(
        &self,
        state: &W::State,
        step: &W::Action,
        lead: impl Fn() -> Vec<W::Action>,
    ) -> Option<W::State> {
        let next = self.world.next_state(state, step.clone())?;
        Some(next).filter(|next| self.world.within_boundary(next) && self.is_new(next, lead))
    }

    /// Records a state, and checks every promise in it. Returns false if the state is known.
    fn is_new(&self, state: &W::State, lead: impl Fn() -> Vec<W::Action>) -> bool {
        if !self.seen.insert(state) {
            return false;
        }
        for (property, reached) in self.properties.iter().zip(&self.reached) {
            let is_end = property.expectation == Expectation::Sometimes;
            if is_end && reached.load(Relaxed) {
                continue;
            }
            if (property.condition)(self.world, state) {
                reached.store(true, Relaxed);
            } else if !is_end {
                self.is_over.store(true, Relaxed);
                let mut broken = self
                    .broken
                    .lock()
                    .expect("no thread panicked with the lock");
                broken.get_or_insert_with(|| Broken {
                    promise: property.name,
                    steps: lead(),
                });
            }
        }
        true
    }
}

/// The hashes of the known states.
struct Seen {
    hasher: RandomState,
    parts: Vec<Mutex<HashSet<u64, BuildHasherDefault<Itself>>>>,
    states: AtomicUsize,
}

impl Default for Seen {
    fn default() -> Self {
        Self {
            hasher: RandomState::with_seeds(1, 2, 3, 4),
            parts: (0..1024).map(|_| Mutex::default()).collect(),
            states: AtomicUsize::new(0),
        }
    }
}

impl Seen {
    fn insert(&self, state: &impl Hash) -> bool {
        let number = self.hasher.hash_one(state);
        // The set uses the lowest and the highest bits of the hash, so other bits choose the part.
        let part = &self.parts[(number >> 40) as usize % self.parts.len()];
        let is_new = part
            .lock()
            .expect("no thread panicked with the lock")
            .insert(number);
        if is_new {
            self.states.fetch_add(1, Relaxed);
        }
        is_new
    }

    fn len(&self) -> usize {
        self.states.load(Relaxed)
    }
}

/// A hasher for numbers that are hashes already.
#[derive(Default)]
struct Itself(u64);

impl Hasher for Itself {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only 64-bit numbers are hashed")
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}
