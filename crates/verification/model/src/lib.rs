//! Exhaustive models of the protocols. Their promises hold in every order of the steps, and each
//! rule is shown to be necessary: without it, a promise breaks.
//!
//! Each world is a module with its state, its steps, its promises, and its rules, each of which can
//! be left out. [`search`] searches a world. The results are compared with the tables in
//! `src/proof.md`, which [`documented`] reads. The models need no server. Their tests are in
//! `crates/verification/tests/model.rs`.

pub mod documented;
pub mod etcd;
pub mod fence;
pub mod lease;
pub mod quorum;
pub mod search;
pub mod searches;

pub use stateright::Model;
