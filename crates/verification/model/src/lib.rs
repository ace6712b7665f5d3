//! The protocols as models that are searched exhaustively: what they promise holds in every order of their steps,
//! and breaks as soon as one of their rules is left out.
//!
//! Each world is a folder: its state, its steps, what it promises, and its rules, each of which can be left out.
//! [`search`] searches a world, [`exhaust`] one that is large; what comes out is compared with the tables in `src/proof.md`, which [`documented`]
//! reads. No server is needed: the tests are in `crates/verification/tests/model.rs`.

pub mod documented;
pub mod etcd;
pub mod exhaust;
pub mod fence;
pub mod lease;
pub mod quorum;
pub mod search;
pub mod searches;

pub use stateright::Model;
