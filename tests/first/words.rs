//! Checks that the repository contains no phrase that the style excludes, and that comments wrap.
//! An exception names a path where such a phrase is correct, and the reason.

use std::{fs, process::Command};

use crate::support::repository;

/// Phrases, and what to write instead.
const PHRASES: &[(&str, &str)] = &[
    ("whoever", "a client that, a waiter that"),
    ("somebody", "a client, a program"),
    ("nobody", "no client, no waiter, no program"),
    ("everyone", "every client, every waiter"),
    ("anew", "again"),
    ("in line", "in the queue"),
    ("place in line", "position in the queue"),
    ("out of the blue", "forged, arbitrary"),
    ("made-up", "forged"),
    ("time line", "timeline"),
    ("has the last word", "takes precedence"),
    ("dead token", "stale token"),
    ("dead tokens", "stale tokens"),
    ("dead up to", "highest stale token"),
    ("hands out", "grants"),
    ("handed out", "granted"),
    ("hand out", "grant"),
    ("of before", "earlier"),
    ("brings back", "re-reports"),
    ("brought back", "re-reported"),
    ("asks again", "retries"),
    ("turned away", "refused"),
    ("nobody's", "lost"),
    ("so to speak", ""),
    ("goes the way of", "matches"),
    ("beside the fence", "colocated with the fence"),
    ("behavior", "behaviour"),
];

/// Paths, the phrase that is allowed below them (empty for all phrases), and the reason.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    (
        "tests/",
        "",
        "names of tests and of helpers, which change with the tests, and this list",
    ),
    ("proptest-regressions/", "everyone", "written by proptest"),
];

fn tracked() -> Vec<String> {
    let mut list = Command::new("git");
    let listed = list.arg("ls-files").current_dir(repository()).output();
    let listed = listed.expect("git is needed to list the files");
    assert!(listed.status.success(), "{listed:?}");
    let listed = String::from_utf8(listed.stdout).unwrap();
    listed.lines().map(str::to_owned).collect()
}

fn is_allowed(path: &str, phrase: &str) -> bool {
    EXCEPTIONS.iter().any(|(prefix, allowed, _)| {
        path.starts_with(prefix) && (allowed.is_empty() || *allowed == phrase)
    })
}

/// Whether a line contains a phrase as whole words.
fn contains(line: &str, phrase: &str) -> bool {
    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(phrase).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + phrase.len()..].chars().next();
        !is_word(before) && !is_word(after)
    })
}

#[test]
fn files_contain_no_phrase_without_a_right_use() {
    let mut found = vec![];
    for path in tracked() {
        let Ok(text) = fs::read_to_string(repository().join(&path)) else {
            continue;
        };
        for (line, number) in text.lines().zip(1..) {
            let lower = line.to_lowercase();
            for (phrase, instead) in PHRASES {
                if contains(&lower, phrase) && !is_allowed(&path, phrase) {
                    found.push(format!(
                        "{path}:{number}: \"{phrase}\": write \"{instead}\""
                    ));
                }
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn comments_wrap_at_100_columns() {
    let mut found = vec![];
    for path in tracked() {
        if ![".rs", ".sql", ".lua"]
            .iter()
            .any(|end| path.ends_with(end))
        {
            continue;
        }
        let text = fs::read_to_string(repository().join(&path)).unwrap();
        for (line, number) in text.lines().zip(1..) {
            let comment = line.trim_start();
            let is_comment = comment.starts_with("//") || comment.starts_with("--");
            // A row of a table or a link cannot be wrapped.
            let is_whole =
                comment.contains("//! |") || comment.contains("/// |") || comment.contains("://");
            if is_comment && !is_whole && line.chars().count() > 100 {
                found.push(format!("{path}:{number}"));
            }
        }
    }
    assert!(
        found.is_empty(),
        "wider than 100 columns:\n{}",
        found.join("\n")
    );
}
