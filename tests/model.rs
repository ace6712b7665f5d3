//! The models: every promise holds in all orders of steps, and breaks without each of the rules. The tables are in
//! `src/proof.md`.
//!
//! `cargo test --test model` searches small bounds; `-- --ignored` the large ones, which takes long.

use tower_fence_model::searches;

#[test]
fn the_fence_holds() {
    searches::fence();
}

#[test]
fn each_rule_of_the_fence_is_needed() {
    searches::rules_of_the_fence();
}

/// Three holders: 11 million states.
#[test]
#[ignore = "takes a minute or two"]
fn the_fence_holds_in_large_bounds() {
    searches::fence_in_large_bounds();
}

#[test]
fn floors_hold() {
    searches::floors();
}

#[test]
fn each_rule_of_floors_is_needed() {
    searches::rules_of_floors();
}

/// Three holders, and a removal: 5 million states.
#[test]
#[ignore = "takes half a minute"]
fn floors_hold_in_large_bounds() {
    searches::floors_in_large_bounds();
}

#[test]
fn idempotency_keys_hold() {
    searches::keys();
}

#[test]
fn each_rule_of_idempotency_keys_is_needed() {
    searches::rules_of_keys();
}

/// Three requests, two crashes, two failures.
#[test]
#[ignore = "larger bounds"]
fn idempotency_keys_hold_in_large_bounds() {
    searches::keys_in_large_bounds();
}

#[test]
fn writes_to_several_resources_hold() {
    searches::several_resources();
}

#[test]
fn each_rule_of_several_resources_is_needed() {
    searches::rules_of_several_resources();
}

#[test]
fn tokens_survive_what_is_lost() {
    searches::losses();
}

#[test]
fn each_rule_of_what_is_lost_is_needed() {
    searches::rules_of_losses();
}

/// Three comparisons that the scripts make all the same.
#[test]
fn what_is_compared_twice_is_not_missed() {
    searches::spare_rules_of_losses();
}

/// Three holders with two losses of Redis have 143 million states.
#[test]
#[ignore = "takes three minutes or more, and 3 GB of memory"]
fn tokens_survive_what_is_lost_in_large_bounds() {
    searches::losses_in_large_bounds();
}

#[test]
fn whoever_waits_in_line_gets_its_turn() {
    searches::line();
}

#[test]
fn each_rule_of_the_line_is_needed() {
    searches::rules_of_the_line();
}

#[test]
fn the_last_word_holds() {
    searches::last_word();
}

#[test]
fn each_rule_of_the_last_word_is_needed() {
    searches::rules_of_the_last_word();
}

/// Two holders with any loss, who may take a new token, have 59 million states.
#[test]
#[ignore = "takes a minute or more, and a gigabyte of memory"]
fn the_last_word_holds_in_large_bounds() {
    searches::last_word_in_large_bounds();
}

#[test]
fn a_quorum_holds() {
    searches::quorum();
}

#[test]
fn each_rule_of_a_quorum_is_needed() {
    searches::rules_of_a_quorum();
}

/// Seventeen million states.
#[test]
#[ignore = "takes minutes"]
fn a_quorum_holds_in_large_bounds() {
    searches::quorum_in_large_bounds();
}

#[test]
fn the_search_of_large_bounds_finds_what_the_other_one_does() {
    searches::searches_agree();
}
