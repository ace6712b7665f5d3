//! The models: every promise holds in all orders of steps, and breaks without each of the rules. The tables are in
//! `src/proof.md`.
//!
//! `cargo test --test model` searches small bounds; `-- --ignored` the large ones, which takes long.
