//! Searches of a world. A breadth-first search finds a shortest counterexample. A depth-first
//! search stores only one 64-bit hash of each known state, so it can search worlds for which a
//! breadth-first search would run out of memory. Both count two states with the same hash as one.
//! Among 10⁸ states, the probability of such a collision is 1 in 3,700.

use std::{
    fmt::{Debug, Display},
    hash::Hash,
    io::{self, Write},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use stateright::{Checker, CheckerBuilder, Expectation, HasDiscoveries, Model, Property};

use crate::documented;

/// A world with rules, each of which can be left out.
///
/// The promises of the world (`always`) must hold in each state. Its possible outcomes
/// (`sometimes`) must be reached. Otherwise the promises could hold merely because no step is
/// possible.
pub trait World:
    Model<
        State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
        Action: Clone + Debug + PartialEq + Send + Sync,
    > + Clone
    + Debug
    + Send
    + Sync
    + 'static
{
    /// A rule or a mechanism. Its `Display` text is its name in the tables of `src/proof.md`.
    type Rule: Copy + Debug + Display + PartialEq + Send + Sync + 'static;

    /// The heading of its section in `src/proof.md`.
    const NAME: &'static str;

    /// All rules, in the order of the table.
    const RULES: &'static [Self::Rule];

    /// Whether the bounds of the rules are searched completely. Those of other worlds are parts of
    /// the small bounds, or too large.
    const BOUNDS_OF_RULES_ADD: bool = false;

    /// Returns the worlds that a normal test run searches.
    fn worlds() -> Vec<Self>;

    /// Returns the worlds whose searches take minutes.
    fn large_worlds() -> Vec<Self> {
        Vec::new()
    }

    /// Returns the smallest bounds in which a promise breaks without this rule.
    fn in_bounds_of(rule: Self::Rule) -> Self;

    /// Returns the same world without this rule.
    #[must_use]
    fn leave_out(self, rule: Self::Rule) -> Self;
}

/// The rules in effect: all, or all but one.
#[derive(Clone, Copy, Debug)]
pub struct Rules<R>(Option<R>);

impl<R> Default for Rules<R> {
    fn default() -> Self {
        Self(None)
    }
}

impl<R: PartialEq> Rules<R> {
    pub fn without(rule: R) -> Self {
        Self(Some(rule))
    }

    pub fn has(&self, rule: R) -> bool {
        self.0 != Some(rule)
    }
}

/// Defines the enum `Rule` of a world, its rules in the order of the table, each with its text, and
/// `Rules`, the rules in effect.
macro_rules! rules {
    ($($rule:ident: $text:literal,)+) => {
        #[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
        pub enum Rule {
            $(#[doc = $text] $rule,)+
        }

        pub type Rules = $crate::search::Rules<Rule>;

        impl Rule {
            pub const ALL: &[Self] = &[$(Self::$rule,)+];
        }

        impl ::std::fmt::Display for Rule {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(match self {
                    $(Self::$rule => $text,)+
                })
            }
        }
    };
}
pub(crate) use rules;

/// Defines the enum `Promise` of a world, each promise with its text. `$broken` reads the first
/// broken promise from a state.
macro_rules! promises {
    ($world:ty, $broken:expr, $($promise:ident: $text:literal,)+) => {
        #[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
        pub enum Promise {
            $(#[doc = $text] $promise,)+
        }

        impl Promise {
            /// Returns a property for each promise.
            pub fn properties() -> Vec<::stateright::Property<$world>> {
                type State = <$world as ::stateright::Model>::State;
                const BROKEN: fn(&State) -> Option<Promise> = $broken;
                vec![$(::stateright::Property::always($text, |_, state| {
                    BROKEN(state) != Some(Promise::$promise)
                }),)+]
            }
        }
    };
}
pub(crate) use promises;

/// Searches whole worlds, and returns the number of states of each. Every promise must hold, and
/// each possible outcome must be reached in each world.
pub fn hold<W: World>(worlds: Vec<W>) -> Vec<usize> {
    let search = |world| count(builder(world).spawn_bfs(), true);
    worlds.into_iter().map(search).collect()
}

/// Like [`hold`], for large worlds.
pub fn hold_depth_first<W: World>(worlds: Vec<W>) -> Vec<usize> {
    let search = |world| count(builder(world).spawn_dfs(), true);
    worlds.into_iter().map(search).collect()
}

/// Searches the bounds of all rules with all rules in effect, and returns their total number of
/// states. Every promise must hold. Possible outcomes are not checked, because such narrow bounds
/// do not reach all of them.
pub fn hold_in_bounds_of_rules<W: World>() -> usize {
    let name = |world: &W| format!("{world:?}");
    let mut searched: Vec<String> = W::worlds().iter().map(name).collect();
    let bounds = W::RULES.iter().map(|rule| W::in_bounds_of(*rule));
    let mut states = 0;
    for world in bounds {
        if !searched.contains(&name(&world)) {
            searched.push(name(&world));
            states += count(builder(world).spawn_bfs(), false);
        }
    }
    states
}

/// Prepares a search that ends early if a promise is broken.
fn builder<W: World>(world: W) -> CheckerBuilder<W> {
    let builder = world.checker().threads(2);
    builder.finish_when(HasDiscoveries::AnyFailures)
}

/// Searches a whole world, and returns the number of states. Every promise must hold. If
/// `reaches_all` is set, each possible outcome must be reached.
fn count<W: World>(checker: impl Checker<W>, reaches_all: bool) -> usize {
    let checker = checker.join();
    for property in checker.model().properties() {
        let path = checker.discovery(property.name);
        match (property.expectation, path) {
            (Expectation::Always, Some(path)) => panic!(
                "{}: broken promise: {}, after\n{}",
                W::NAME,
                property.name,
                format_steps(&path.into_actions())
            ),
            (Expectation::Sometimes, None) if reaches_all => {
                panic!("{}: not reached: {}", W::NAME, property.name)
            }
            (Expectation::Always | Expectation::Sometimes, _) => {}
            (Expectation::Eventually, _) => {
                panic!("stateright does not find all violations of `eventually`")
            }
        }
    }
    let states = checker.unique_state_count();
    print(&format!(
        "{}: {states} states, every promise holds",
        W::NAME
    ));
    states
}

/// Leaves out each rule alone. Compares the promise that breaks, and the number of steps, with the
/// documented table. With the rule in effect, no promise breaks within as many steps.
pub fn each_rule_is_needed<W: World>() {
    let mut rows = Vec::new();
    print(&format!(
        "{}\n| rule | left out | what breaks | steps |\n|---|---|---|---|",
        W::NAME
    ));
    for (number, &rule) in (1..).zip(W::RULES) {
        let (property, steps) = UntilBroken::search(W::in_bounds_of(rule).leave_out(rule), None)
            .unwrap_or_else(|| panic!("{}: no promise breaks without the rule: {rule}", W::NAME));
        if let Some((property, steps)) =
            UntilBroken::search(W::in_bounds_of(rule), Some(steps.len()))
        {
            panic!(
                "{}: {property}, with the rule: {rule}, after\n{}",
                W::NAME,
                format_steps(&steps)
            );
        }
        let row = documented::Row {
            number,
            rule: rule.to_string(),
            property: property.to_owned(),
            steps: steps.len(),
        };
        print(&format!("{row}\n{}", format_steps(&steps)));
        rows.push(row);
    }
    assert_eq!(documented::table(W::NAME), rows, "src/proof.md differs");
}

/// A world that takes no further steps after a promise is broken. After a failure, the checker of
/// stateright continues for a while, and keeps the last failure. This world keeps the first one,
/// which has a shortest counterexample.
struct UntilBroken<W> {
    world: W,
    broken: AtomicBool,
}

impl<W: World> UntilBroken<W> {
    /// Returns the promise that this state breaks.
    fn failure(&self, state: &W::State) -> Option<&'static str> {
        let properties = self.world.properties();
        let mut promises = properties
            .iter()
            .filter(|property| property.expectation == Expectation::Always);
        let broken = promises.find(|property| !(property.condition)(&self.world, state));
        broken.map(|property| property.name)
    }

    /// Searches until a promise is broken, or all states after at most `longest` steps are found.
    /// Returns the name of the promise, and the steps that break it.
    fn search(world: W, longest: Option<usize>) -> Option<(&'static str, Vec<W::Action>)> {
        let broken = AtomicBool::new(false);
        let checker = Self { world, broken }.checker().threads(1);
        // An initial state has the depth 1, and states of the maximum depth are not examined.
        let checker = match longest {
            Some(steps) => checker.target_max_depth(steps + 2),
            None => checker,
        };
        let checker = checker.spawn_bfs().join();
        // `discovery` executes the steps of the path again.
        checker.model().broken.store(false, Relaxed);
        let path = checker.discovery("kept")?;
        let property = checker.model().failure(path.last_state());
        Some((property.expect("a promise is broken"), path.into_actions()))
    }
}

impl<W: World> Model for UntilBroken<W> {
    type State = W::State;
    type Action = W::Action;

    fn init_states(&self) -> Vec<W::State> {
        self.world.init_states()
    }

    fn actions(&self, state: &W::State, actions: &mut Vec<W::Action>) {
        if !self.broken.load(Relaxed) {
            self.world.actions(state, actions);
        }
    }

    fn next_state(&self, state: &W::State, action: W::Action) -> Option<W::State> {
        self.world.next_state(state, action)
    }

    fn within_boundary(&self, state: &W::State) -> bool {
        self.world.within_boundary(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("kept", |this: &Self, state| {
            // Only the first failure is kept.
            this.broken.load(Relaxed)
                || this.failure(state).is_none()
                || this.broken.swap(true, Relaxed)
        })]
    }
}

/// Formats the steps, one step on each line.
fn format_steps(steps: &[impl Debug]) -> String {
    let steps = (1..).zip(steps);
    steps
        .map(|(n, step)| format!("  {n}. {step:?}\n"))
        .collect()
}

/// Prints a string that the test harness does not capture.
fn print(text: &str) {
    writeln!(io::stdout(), "{text}").expect("the output is open");
}
