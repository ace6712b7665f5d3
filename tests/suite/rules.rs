//! The table of rules in `main.rs` names tests that exist, for each of the nine rules.

use std::{collections::HashSet, env, process::Command};

/// The modules that hold one test for each database or lease store.
const OVER_EACH: [&str; 11] = [
    "on_postgres",
    "partitioned",
    "without_versions",
    "bare",
    "on_sqlite",
    "on_redis",
    "on_a_cluster",
    "on_a_quorum",
    "on_etcd",
    "embedded",
    "over_http",
];

/// The tests of this executable, without the database or the store that they run over.
fn tests() -> HashSet<String> {
    let list = Command::new(env::current_exe().unwrap())
        .args(["--list", "--format", "terse"])
        .output()
        .unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    let tests = list.lines().filter_map(|line| line.strip_suffix(": test"));
    let path = |test: &str| {
        let modules = test.split("::").filter(|name| !OVER_EACH.contains(name));
        modules.collect::<Vec<_>>().join("::")
    };
    tests.map(path).collect()
}

/// The rows of the table: a rule, or nothing where it is that of the row before, and a test.
fn rows() -> Vec<(&'static str, &'static str)> {
    let lines = include_str!("main.rs").lines();
    let row = |line: &'static str| {
        let (rule, test) = line.strip_prefix("//! |")?.split_once('|')?;
        let test = test.trim().strip_prefix('`')?.strip_suffix("` |")?;
        Some((rule.trim(), test))
    };
    lines.filter_map(row).collect()
}

#[test]
fn each_rule_has_tests_and_each_of_them_exists() {
    let (tests, rows) = (tests(), rows());
    let unknown = rows.iter().filter(|(_, test)| !tests.contains(*test));
    let unknown: Vec<_> = unknown.map(|(_, test)| test).collect();
    assert!(unknown.is_empty(), "no such tests: {unknown:#?}");
    for number in 1..=9 {
        let rule = format!("{number}. ");
        let has_tests = rows.iter().any(|(name, _)| name.starts_with(&rule));
        assert!(has_tests, "rule {number} has no tests");
    }
}
