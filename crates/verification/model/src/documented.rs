//! The documented tables and numbers of states in `src/proof.md`.

use std::fmt;

const PROOF: &str = include_str!("../../../../src/proof.md");

/// A row of a table: the number of a rule, the rule, the property that breaks without it, and the
/// number of steps of a shortest counterexample.
#[derive(Debug, PartialEq)]
pub struct Row {
    pub number: usize,
    pub rule: String,
    pub property: String,
    pub steps: usize,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "| {} | {} | {} | {} |",
            self.number, self.rule, self.property, self.steps
        )
    }
}

/// Returns the rows of the first table below the heading with this text.
pub fn table(heading: &str) -> Vec<Row> {
    below(heading)
        .skip_while(|line| !line.starts_with("|---"))
        .skip(1)
        .take_while(|line| line.starts_with('|'))
        .map(row)
        .collect()
}

/// Checks that the section with this heading contains these numbers of states, or their sum.
pub fn are_documented(heading: &str, states: &[usize]) {
    let text = below(heading).take_while(|line| !line.starts_with('#'));
    let words = text.flat_map(str::split_whitespace);
    let numbers: Vec<_> = words.map(digits).collect();
    let is_documented = |number: &usize| numbers.contains(&number.to_string());
    let sum: usize = states.iter().sum();
    assert!(
        is_documented(&sum) || states.iter().all(is_documented),
        "src/proof.md: {heading}: {states:?} states, in total {sum}, are not documented"
    );
}

/// Returns the digits of a number in a word, such as `(1,948,173`.
fn digits(word: &str) -> String {
    let end = |letter: char| !letter.is_ascii_digit();
    word.trim_matches(end).replace(',', "")
}

/// Returns the lines below the heading with this text.
fn below(heading: &str) -> impl Iterator<Item = &'static str> {
    let mut lines = PROOF.lines();
    let found =
        lines.any(|line| line.trim_start_matches('#').trim() == heading && line.starts_with('#'));
    assert!(found, "src/proof.md has no heading: {heading}");
    lines
}

fn row(line: &str) -> Row {
    let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
    let [number, rule, property, steps] = cells[..] else {
        panic!("not four cells: {line}");
    };
    Row {
        number: number.parse().expect("the number of a rule"),
        rule: rule.to_owned(),
        property: property.to_owned(),
        steps: steps.parse().expect("a number of steps"),
    }
}
