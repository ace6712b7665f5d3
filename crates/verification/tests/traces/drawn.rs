//! What was drawn of a world over all walks: the kinds of its steps, and what it can come to.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
};

use stateright::{Expectation, Model};

#[derive(Default)]
pub struct Drawn {
    taken: BTreeMap<String, usize>,
    possible: BTreeSet<String>,
    /// What a world can come to, and whether it did.
    ends: BTreeMap<&'static str, bool>,
}

impl Drawn {
    /// Notes what could happen in a state.
    pub fn was_possible<S: Debug>(&mut self, steps: &[S]) {
        self.possible.extend(steps.iter().map(kind));
    }

    pub fn was_taken<S: Debug>(&mut self, step: &S) {
        *self.taken.entry(kind(step)).or_default() += 1;
    }

    /// Notes a state, and what it has come to.
    pub fn was_reached<M: Model>(&mut self, world: &M, state: &M::State) {
        for property in world.properties() {
            if property.expectation == Expectation::Sometimes {
                let end = self.ends.entry(property.name).or_default();
                *end |= (property.condition)(world, state);
            }
        }
    }

    /// Checks that each kind of step was drawn that was ever possible, and each end reached, but for those that are
    /// named.
    pub fn are_all_but(&self, never: &[&str]) {
        println!("{:?}", self.taken);
        let kinds = self.possible.iter().map(String::as_str);
        let kinds = kinds.filter(|kind| !self.taken.contains_key(*kind));
        let ends = self.ends.iter().filter(|(_, reached)| !**reached);
        let missing: BTreeSet<&str> = kinds.chain(ends.map(|(end, _)| *end)).collect();
        assert_eq!(missing, never.iter().copied().collect());
    }
}

/// The name of a step without what it is about.
fn kind<S: Debug>(step: &S) -> String {
    let step = format!("{step:?}");
    let end = step.find(|letter: char| !letter.is_alphanumeric());
    step[..end.unwrap_or(step.len())].to_owned()
}
