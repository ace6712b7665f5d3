//! What the protocols of `tower-fence` are verified by. `src/proof.md` says what each part shows.
//!
//! - `tests/model.rs` searches the models in `model`: every promise holds in all orders of steps, and breaks without
//!   each of the rules.
//! - `tests/traces` has the fence and the lease stores take steps that are drawn from the models.
//! - `tests/interleavings.rs` runs the tasks of the library in orders that a scheduler chooses.
//! - `tests/faults` runs clients while servers fail, and checks all that they were answered.
//! - `fuzz` has targets for cargo-fuzz. It is a workspace of its own.
