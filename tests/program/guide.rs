//! The page for teams whose services are not written in Rust.

use super::program::{run, words};

const PAGE: &str = include_str!("../../src/server.md");

/// The tests of `clients` run this worker.
#[test]
fn python_code_of_the_page_is_that_of_the_worker() {
    const WORKER: &str = include_str!("../../examples/clients/worker.py");
    let mut shown = 0;
    let page = include_str!("../../src/docs/guide/clients.md");
    for block in page.split("```python\n").skip(1) {
        let (block, _) = block.split_once("```").unwrap();
        for part in block.trim().split("\n\n\n") {
            assert!(WORKER.contains(part), "not in the worker:\n{part}");
            shown += part.lines().count();
        }
    }
    assert!(shown > 15, "{shown}");
}

/// Each variable and option that the page names must exist in the program.
#[tokio::test]
async fn everything_the_page_names_exists() {
    let mut known = String::new();
    for command in words("serve run leases inspect break reset migrate") {
        known += &run(&[command, "--help"], &[]).await.stdout;
    }
    let example = include_str!("../../crates/server/packaging/tower-fence.env");
    let readme = include_str!("../../README.md");
    let text = format!("{PAGE} {example} {readme}");
    let names = text.split(|c: char| !(c.is_ascii_uppercase() || c == '_'));
    let is_variable = |name: &&str| name.starts_with("TOWER_FENCE_") && *name != "TOWER_FENCE_";
    let variables: Vec<_> = names.filter(is_variable).collect();
    assert!(variables.len() > 10, "{variables:?}");
    for variable in variables {
        assert!(known.contains(variable), "the program has no {variable}");
    }
}
