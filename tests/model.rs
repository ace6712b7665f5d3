//! The models: every promise holds in all orders of steps, and breaks without each of the rules. The tables are in
//! `src/proof.md`.
//!
//! `cargo test --test model` searches small bounds; `-- --ignored` the large ones, which takes long.

use tower_fence_model::{
    quorum::{Bounds, Quorum},
    search::{World, each_rule_is_needed, holds},
};

#[test]
fn a_quorum_holds() {
    for bounds in Bounds::small() {
        holds(Quorum::new(bounds));
    }
}

#[test]
fn each_rule_of_a_quorum_is_needed() {
    each_rule_is_needed::<Quorum>();
}

#[test]
#[ignore = "takes long"]
fn a_quorum_holds_in_large_bounds() {
    for bounds in Bounds::large() {
        holds(Quorum::new(bounds));
    }
}

/// Each rule is missed in these bounds when it is left out.
#[test]
#[ignore = "takes long"]
fn a_quorum_holds_where_each_rule_is_missed() {
    for &rule in Quorum::RULES {
        holds(Quorum::new(Bounds::without(rule)));
    }
}
