//! Compares `tests/tiers` with the targets of the workspace, and with the tests of each target.

use std::{collections::BTreeMap, env, fs, path::Path, process::Command};

use serde_json::Value;

use crate::support::{repository, variable};

/// A line of the manifest: a tier, a target, and one of its modules.
#[derive(Debug)]
struct Line {
    tier: String,
    target: String,
    module: String,
}

impl Line {
    fn has(&self, test: &str) -> bool {
        let rest = test.strip_prefix(&self.module);
        self.module == "*" || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    }
}

/// Returns the lines that assign tests to tiers, and those of tests that run alone.
fn manifest(text: &str) -> (Vec<Line>, Vec<Line>) {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let lines = lines.flat_map(|line| {
        let mut words = line.split_whitespace();
        let (tier, target) = (words.next(), words.next());
        words.map(move |module| Line {
            tier: tier.unwrap().into(),
            target: target.unwrap().into(),
            module: module.into(),
        })
    });
    lines.partition(|line| line.tier != "alone")
}

/// Returns the targets of the workspace that may have tests.
fn targets() -> Vec<String> {
    let metadata = Command::new(variable("CARGO"))
        .args(["metadata", "--no-deps", "--locked", "--format-version", "1"])
        .current_dir(repository())
        .output()
        .unwrap();
    assert!(metadata.status.success(), "{metadata:?}");
    let metadata: Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap().iter();
    let targets = packages.flat_map(|package| package["targets"].as_array().unwrap());
    let mut names = vec![];
    for target in targets {
        let (name, kind) = (target["name"].as_str().unwrap(), &target["kind"][0]);
        // The unit tests and the examples of the libraries run together.
        let libraries = [
            "tower_fence",
            "tower_fence_console",
            "tower_fence_etcd",
            "tower_fence_redlock",
        ];
        let is_library = libraries.contains(&name);
        let of_library = is_library && kind == "lib";
        if kind == "test" {
            names.push(name.to_owned());
        } else if target["test"] == true {
            names.push(
                if of_library {
                    "lib"
                } else if name == "tower-fence" {
                    "bin"
                } else {
                    name
                }
                .into(),
            );
        }
        if target["doctest"] == true {
            names.push(if of_library {
                "doc".into()
            } else {
                format!("doc of {name}")
            });
        }
    }
    names.sort();
    names.dedup();
    names
}

/// Returns the faults of a manifest, given the tests of some targets.
fn faults(text: &str, targets: &[String], tests: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let (lines, alone) = manifest(text);
    let mut faults = vec![];
    let is_listed = |target: &String| lines.iter().any(|line| line.target == *target);
    let unlisted = targets.iter().filter(|target| !is_listed(target));
    faults.extend(unlisted.map(|target| format!("the target {target} is in no tier")));
    let unknown = lines.iter().filter(|line| !targets.contains(&line.target));
    faults.extend(unknown.map(|line| format!("no such target: {line:?}")));
    for (target, tests) in tests {
        let of_target = |line: &&Line| line.target == *target;
        for test in tests {
            let tiers = lines.iter().filter(of_target).filter(|line| line.has(test));
            match tiers.count() {
                0 => faults.push(format!("{target}: {test} is in no tier")),
                1 => {}
                _ => faults.push(format!("{target}: {test} is in two tiers")),
            }
        }
        let all = lines.iter().chain(&alone).filter(of_target);
        let empty = all.filter(|line| !tests.iter().any(|test| line.has(test)));
        faults.extend(empty.map(|line| format!("no such tests: {line:?}")));
    }
    faults
}

/// Returns the tests that `tests/run` has listed, by target.
fn listed() -> BTreeMap<String, Vec<String>> {
    let mut tests = BTreeMap::new();
    for list in fs::read_dir(variable("TEST_LISTS")).unwrap() {
        let path = list.unwrap().path();
        if path.extension().is_none() {
            let target = path.file_name().unwrap().to_str().unwrap().to_owned();
            let list = fs::read_to_string(&path).unwrap();
            tests.insert(target, list.lines().map(str::to_owned).collect());
        }
    }
    tests
}

/// `tests/run` lists the targets of the tiers that it runs, and all targets with `--all`.
#[test]
fn each_test_is_in_one_tier() {
    let text = fs::read_to_string(repository().join("tests/tiers")).unwrap();
    let (targets, tests) = (targets(), listed());
    assert!(tests.contains_key("first"), "{:?}", tests.keys());
    assert_eq!(faults(&text, &targets, &tests), [""; 0]);
    if env::var_os("TEST_LISTS_COMPLETE").is_some() {
        let unlisted = targets.iter().filter(|target| !tests.contains_key(*target));
        // The tests of this target have no names before they run.
        assert_eq!(unlisted.collect::<Vec<_>>(), ["doc"]);
    }
}

/// The table in `CONTRIBUTING.md` has nine promises, and names tests of this tier.
#[test]
fn each_promise_has_a_test() {
    let text = fs::read_to_string(repository().join("CONTRIBUTING.md")).unwrap();
    let (_, table) = text.split_once("| promise | test |").unwrap();
    let rows = table
        .lines()
        .skip(2)
        .map_while(|row| row.strip_prefix("| "));
    let (tests, mut promises) = (&listed()["first"], 0);
    for row in rows {
        let (promise, test) = row.split_once("| ").unwrap();
        let test = test.trim_matches(['`', ' ', '|']);
        assert!(tests.iter().any(|one| one == test), "no such test: {test}");
        promises += usize::from(promise.starts_with(&format!("{}. ", promises + 1)));
    }
    assert_eq!(promises, 9);
}

/// A file that no module names is not compiled, so its tests are in no list.
#[test]
fn each_file_of_tests_is_a_module() {
    let files = Command::new("git")
        .args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "tests/*.rs",
        ])
        .current_dir(repository())
        .output()
        .unwrap();
    let files = String::from_utf8(files.stdout).unwrap();
    let mut unnamed = vec![];
    for file in files.lines().map(Path::new) {
        let (mut folder, mut name) = (file.parent().unwrap(), file.file_stem().unwrap());
        if name == "main" || name == "lib" || !repository().join(file).exists() {
            continue;
        }
        if name == "mod" {
            (folder, name) = (folder.parent().unwrap(), folder.file_name().unwrap());
        }
        let name = name.to_str().unwrap();
        let is_named = ["mod.rs", "main.rs", "lib.rs", "first/main.rs"]
            .iter()
            .any(|parent| {
                let text = fs::read_to_string(repository().join(folder).join(parent));
                let text = text.unwrap_or_default();
                text.contains(&format!("mod {name};")) || text.contains(&format!("/{name}/mod.rs"))
            });
        if !is_named {
            unnamed.push(file);
        }
    }
    assert!(unnamed.is_empty(), "{unnamed:?}");
    assert!(files.lines().count() > 100);
}

/// No test is excluded by an attribute. A test with further requirements belongs to another tier.
#[test]
fn no_test_is_ignored() {
    let ignored = Command::new("git")
        .args(["grep", "-n", "-E", r"^\s*#\[ignore"])
        .current_dir(repository())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&ignored.stdout), "");
    // git exits with 1 if no line matches, and with another status if the search fails.
    assert_eq!(ignored.status.code(), Some(1), "{ignored:?}");
}
