//! The contract. The tests compare this implementation with `src/spec.md`, with the vectors of the
//! contract in `tests/vectors`, with the SQL in the documentation, and with the URLs in answers.

mod admission;
mod field;
mod functions;
mod rights;
mod signed;
mod signed_fuzz;
mod tokens;

use std::fs;

use axum::{body::to_bytes, response::Response};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tower_fence::problem::ProblemType;

pub use crate::support::fence::{resource, token};

pub fn vectors<T: DeserializeOwned>(file: &str) -> T {
    serde_json::from_str(&text(&format!("tests/vectors/{file}"))).unwrap()
}

/// Returns the text of a file of the repository.
pub fn text(path: &str) -> String {
    fs::read_to_string(crate::support::repository().join(path)).unwrap()
}

pub async fn json(response: Response) -> Value {
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    serde_json::from_slice(&body).unwrap()
}

pub async fn problem(response: Response, name: &str, context: &str) -> Value {
    let problem = json(response).await;
    let kind = problem["type"].as_str().unwrap_or_default();
    assert!(kind.ends_with(&format!("#{name}")), "{context}: {problem}");
    problem
}

/// Returns the SQL blocks in a text.
pub fn sql_blocks(text: &str) -> Vec<&str> {
    let blocks = text.split("```");
    blocks
        .filter_map(|block| block.strip_prefix("sql\n"))
        .collect()
}

/// Returns the GRANT statements that the deployment page lists for a role.
pub fn grants(role: &str) -> String {
    let documentation = text("src/deployment.md");
    let to_role = format!(" TO {role};");
    let blocks = sql_blocks(&documentation).into_iter();
    let grants: Vec<_> = blocks.filter(|block| block.contains(&to_role)).collect();
    assert_eq!(grants.len(), 1, "one list of rights of {role}");
    grants[0].to_owned()
}

#[test]
fn each_problem_type_is_a_section_of_the_documentation() {
    const ADDRESS: &str = "https://docs.rs/tower-fence/latest/tower_fence/problem/#";
    let page = text("src/problem.md");
    let sections = page.lines().filter_map(|line| line.strip_prefix("## "));
    let mut sections: Vec<_> = sections.collect();
    let types = ProblemType::ALL.iter();
    let mut anchors: Vec<_> = types
        .map(|kind| kind.uri().strip_prefix(ADDRESS).unwrap())
        .collect();
    sections.sort_unstable();
    anchors.sort_unstable();
    assert_eq!(anchors, sections);
    anchors.dedup();
    assert_eq!(anchors.len(), ProblemType::ALL.len());
}
