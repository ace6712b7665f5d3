//! The coverage of a model by all walks: the kinds of steps that were taken, and the outcomes that
//! were reached.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
};

use stateright::{Expectation, Model};

#[derive(Default)]
pub struct Drawn {
    taken: BTreeMap<String, usize>,
    possible: BTreeSet<String>,
    /// The possible outcomes. The flag is whether a walk has reached the outcome.
    ends: BTreeMap<&'static str, bool>,
}

impl Drawn {
    /// Records the possible steps of a state.
    pub fn was_possible<S: Debug>(&mut self, steps: &[S]) {
        self.possible.extend(steps.iter().map(kind));
    }

    pub fn was_taken<S: Debug>(&mut self, step: &S) {
        *self.taken.entry(kind(step)).or_default() += 1;
    }

    /// Records the outcomes that a state reaches.
    pub fn was_reached<M: Model>(&mut self, world: &M, state: &M::State) {
        for property in world.properties() {
            if property.expectation == Expectation::Sometimes {
                let end = self.ends.entry(property.name).or_default();
                *end |= (property.condition)(world, state);
            }
        }
    }

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
