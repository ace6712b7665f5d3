//! Runs of the code that tasks share, in orders of its steps that a scheduler chooses. The files of
//! `src` are compiled against a model of threads, tasks and time ([`model`]). The scenarios check
//! the promises of these files ([`scenarios`]).
//!
//! Broken variants of the files ([`mutants`]) must make their scenarios fail.
// The original files are linted, so the copies are not.
#![allow(unused, unfulfilled_lint_expectations, private_interfaces, clippy::all)]

pub mod model;
pub mod mutants;
pub mod scenarios;
mod search;

pub use search::{holds, loses};

// The copies that the build script has created.
include!(concat!(env!("OUT_DIR"), "/src/root.rs"));
