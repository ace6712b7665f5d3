//! What tasks share, in orders of their steps that a scheduler chooses: files of `src`, compiled against a model of
//! threads, tasks and time ([`model`]), and what must hold of them ([`scenarios`]).
//!
//! Each scenario has broken variants beside it ([`mutants`]), at which it has to fail.
// The copies are looked after where they come from.
#![allow(unused, unfulfilled_lint_expectations, private_interfaces, clippy::all)]

pub mod model;
pub mod mutants;
pub mod scenarios;
mod search;

pub use search::{holds, loses};

// The copies that the build script has made.
include!(concat!(env!("OUT_DIR"), "/src/root.rs"));
