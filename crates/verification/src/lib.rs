//! Verification of the protocols of `tower-fence`. `src/proof.md` describes what each part shows.
//!
//! - `tests/model.rs` searches the models in `model`. It checks that each promise holds in all
//!   orders of the steps, and that a promise breaks if any one of the rules is left out.
//! - `tests/traces` runs steps that are drawn from the models against the real fence and lease
//!   stores.
//! - `tests/interleavings.rs` runs the tasks of the library in orders that a scheduler chooses.
//! - `tests/faults` runs clients while servers fail, and checks all responses that they receive.
//! - `fuzz` is a separate workspace with the targets for cargo-fuzz.
