//! The models: every promise holds in all orders of steps, and breaks without each of the rules. The tables are in
//! `src/proof.md`.
//!
//! `cargo test --test model` searches small bounds; `-- --ignored` the large ones, which takes long.

use tower_fence_model::{
    fence::{floors::Floors, keys::Keys, several::Several, writes::Writes},
    search::{each_rule_is_needed, holds},
};

#[test]
fn the_fence_holds() {
    holds(Writes::small());
}

#[test]
fn each_rule_of_the_fence_is_needed() {
    each_rule_is_needed::<Writes>();
}

/// Three holders.
#[test]
#[ignore = "many millions of states, minutes"]
fn the_fence_holds_in_large_bounds() {
    holds(Writes::large());
}

#[test]
fn floors_hold() {
    holds(Floors::small());
}

#[test]
fn each_rule_of_floors_is_needed() {
    each_rule_is_needed::<Floors>();
}

/// Three holders, and a removal.
#[test]
#[ignore = "many millions of states, minutes"]
fn floors_hold_in_large_bounds() {
    holds(Floors::large());
}

#[test]
fn idempotency_keys_hold() {
    holds(Keys::small());
}

#[test]
fn each_rule_of_idempotency_keys_is_needed() {
    each_rule_is_needed::<Keys>();
}

/// Three requests, two crashes, two failures: 5,292 states.
#[test]
#[ignore = "larger bounds"]
fn idempotency_keys_hold_in_large_bounds() {
    holds(Keys::large());
}

#[test]
fn writes_to_several_resources_hold() {
    holds(Several::small());
}

#[test]
fn each_rule_of_several_resources_is_needed() {
    each_rule_is_needed::<Several>();
}
