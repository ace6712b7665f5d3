//! The tables of `src/proof.md`.

use std::fmt;

const PROOF: &str = include_str!("../../../src/proof.md");

/// What breaks without a rule, and after how many steps at the earliest.
#[derive(Debug, PartialEq)]
pub struct Row {
    pub rule: String,
    pub property: String,
    pub steps: usize,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "| {} | {} | {} |", self.rule, self.property, self.steps)
    }
}

/// The rows of the first table below the heading with this text.
pub fn table(heading: &str) -> Vec<Row> {
    let mut lines = PROOF.lines();
    let found =
        lines.any(|line| line.trim_start_matches('#').trim() == heading && line.starts_with('#'));
    assert!(found, "src/proof.md has no heading: {heading}");
    lines
        .skip_while(|line| !line.starts_with("|---"))
        .skip(1)
        .take_while(|line| line.starts_with('|'))
        .map(row)
        .collect()
}

fn row(line: &str) -> Row {
    let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
    let [rule, property, steps] = cells[..] else {
        panic!("not three cells: {line}");
    };
    Row {
        rule: rule.to_owned(),
        property: property.to_owned(),
        steps: steps.parse().expect("a number of steps"),
    }
}
