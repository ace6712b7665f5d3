//! Compares `tests/versions` with the README, which names the same servers.

use std::{collections::BTreeMap, fs};

use crate::support::repository;

/// The versions of each kind of server.
type Versions = BTreeMap<String, Vec<String>>;

/// Returns the versions that the tier `versions` tests.
fn tested(list: &str) -> Versions {
    let mut versions = Versions::new();
    for line in list.lines() {
        let mut words = line.split_whitespace();
        if words.next() == Some("server") {
            let (kind, version) = (words.next().unwrap(), words.next().unwrap());
            versions
                .entry(kind.into())
                .or_default()
                .push(version.into());
        }
    }
    versions
}

/// Returns the rows of the table in the README: a server and its versions.
fn named(readme: &str) -> Versions {
    let (_, table) = readme.split_once("| server | tested versions |").unwrap();
    let rows = table.lines().skip(2);
    let rows = rows.map_while(|row| {
        row.strip_prefix("| ")?
            .strip_suffix(" |")?
            .split_once(" | ")
    });
    rows.map(|(kind, versions)| {
        let versions = versions.split(", ").map(str::to_owned).collect();
        (kind.to_lowercase(), versions)
    })
    .collect()
}

#[test]
fn readme_names_the_tested_versions() {
    let read = |file: &str| fs::read_to_string(repository().join(file)).unwrap();
    let tested = tested(&read("tests/versions"));
    assert_eq!(named(&read("README.md")), tested);
    assert_eq!(tested.len(), 5, "{tested:?}");
}
