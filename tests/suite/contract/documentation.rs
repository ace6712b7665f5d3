//! The addresses that answers name are there in the documentation as it is built.

use std::{fs, path::Path, process::Command};

use tower_fence::problem::ProblemType;

#[test]
fn the_type_of_each_problem_is_an_anchor_of_the_documentation() {
    // The documentation is built where the tests were: dependencies are checked already.
    let tests = std::env::current_exe().unwrap();
    let target = tests.ancestors().nth(3).unwrap();
    build_documentation(target);
    let page = fs::read_to_string(target.join("doc/tower_fence/problem/index.html")).unwrap();
    for kind in ProblemType::ALL {
        let (address, anchor) = kind.uri().split_once('#').unwrap();
        assert_eq!(
            address,
            "https://docs.rs/tower-fence/latest/tower_fence/problem/"
        );
        assert!(page.contains(&format!("id=\"{anchor}\"")), "{anchor}");
    }
}

fn build_documentation(target: &Path) {
    let status = Command::new(env!("CARGO"))
        .args([
            "doc",
            "--locked",
            "--quiet",
            "--no-deps",
            "--all-features",
            "--target-dir",
        ])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status();
    assert!(status.unwrap().success());
}
