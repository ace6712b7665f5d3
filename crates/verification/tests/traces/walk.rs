//! A walk through a model, and the coverage of the model by all walks: the kinds of steps that were
//! taken, and the outcomes that were reached.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
};

use rand::{SeedableRng, rngs::StdRng};
use stateright::Expectation;
use tower_fence_model::search::World;

thread_local! {
    /// Whether a walk has failed on this thread.
    pub static HAS_FAILED: Cell<bool> = const { Cell::new(false) };
}

/// A walk, which an implementation executes. If the test fails, the walk prints its steps.
pub struct Walk<'a, W: World> {
    pub world: &'a W,
    pub seed: u64,
    pub random: StdRng,
    /// The state after the last step.
    pub state: W::State,
    pub taken: Vec<W::Action>,
    drawn: &'a mut Drawn,
}

impl<'a, W: World> Walk<'a, W> {
    pub fn begin(world: &'a W, seed: u64, drawn: &'a mut Drawn) -> Self {
        Self {
            world,
            seed,
            random: StdRng::seed_from_u64(seed),
            state: world.init_states().remove(0),
            taken: vec![],
            drawn,
        }
    }

    /// Returns the possible steps.
    pub fn possible(&mut self) -> Vec<W::Action> {
        let steps = possible(self.world, &self.state);
        self.were_possible(&steps);
        steps
    }

    /// Records possible steps.
    pub fn were_possible(&mut self, steps: &[W::Action]) {
        self.drawn.possible.extend(steps.iter().map(kind));
    }

    /// Takes a step. Returns the state before it.
    pub fn go(&mut self, step: W::Action) -> W::State {
        let after = self.world.next_state(&self.state, step.clone());
        self.reach(step, after.expect("the step is possible"))
    }

    /// Takes a step that leads to this state, if it is the step of a whole call. Returns the state
    /// before it.
    pub fn reach(&mut self, step: W::Action, after: W::State) -> W::State {
        *self.drawn.taken.entry(kind(&step)).or_default() += 1;
        self.taken.push(step);
        for property in self.world.properties() {
            if property.expectation == Expectation::Sometimes {
                let end = self.drawn.ends.entry(property.name).or_default();
                *end |= (property.condition)(self.world, &after);
            }
        }
        std::mem::replace(&mut self.state, after)
    }
}

impl<W: World> Drop for Walk<'_, W> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            HAS_FAILED.set(true);
            let Self {
                world,
                seed,
                taken,
                state,
                ..
            } = self;
            eprintln!("{world:?} by seed {seed}, after {taken:#?}:\n{state:?}");
        }
    }
}

/// Returns the possible steps of a state.
pub fn possible<W: World>(world: &W, state: &W::State) -> Vec<W::Action> {
    let mut steps = vec![];
    world.actions(state, &mut steps);
    steps
}

#[derive(Default)]
pub struct Drawn {
    taken: BTreeMap<String, usize>,
    possible: BTreeSet<String>,
    /// The possible outcomes. The flag is whether a walk has reached the outcome.
    ends: BTreeMap<&'static str, bool>,
}

impl Drawn {
    /// Checks that each kind of possible step was taken, and each outcome reached, except those in
    /// `never`.
    pub fn are_all_but(&self, never: &[&str]) {
        println!("{:?}", self.taken);
        let kinds = self.possible.iter().map(String::as_str);
        let kinds = kinds.filter(|kind| !self.taken.contains_key(*kind));
        let ends = self.ends.iter().filter(|(_, reached)| !**reached);
        let missing: BTreeSet<&str> = kinds.chain(ends.map(|(end, _)| *end)).collect();
        assert_eq!(missing, never.iter().copied().collect());
    }
}

/// Returns the name of a step without its arguments. A loss or a request has the name of its kind.
fn kind<S: Debug>(step: &S) -> String {
    let step = format!("{step:?}");
    let step = step.trim_start_matches("Lose(").trim_start_matches("Ask(");
    let end = step.find(|letter: char| !letter.is_alphanumeric());
    step[..end.unwrap_or(step.len())].to_owned()
}
