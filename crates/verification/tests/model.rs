//! Searches of the models: each promise holds in all orders of the steps, and a promise breaks if
//! any one of the rules is left out. The tables are in `src/proof.md`.
//!
//! These tests search small bounds. `cargo run --release -p tower-fence-model` searches large ones.

use tower_fence_model::searches;

#[test]
fn promises_of_the_fence_hold() {
    searches::fence();
}

#[test]
fn each_rule_of_the_fence_is_needed() {
    searches::rules_of_the_fence();
}

#[test]
fn promises_of_floors_hold() {
    searches::floors();
}

#[test]
fn each_rule_of_floors_is_needed() {
    searches::rules_of_floors();
}

#[test]
fn promises_of_idempotency_keys_hold() {
    searches::keys();
}

#[test]
fn each_rule_of_idempotency_keys_is_needed() {
    searches::rules_of_keys();
}

#[test]
fn promises_of_several_resources_hold() {
    searches::several_resources();
}

#[test]
fn each_rule_of_several_resources_is_needed() {
    searches::rules_of_several_resources();
}

#[test]
fn token_promises_hold_despite_data_loss() {
    searches::losses();
}

#[test]
fn each_rule_of_data_loss_is_needed() {
    searches::rules_of_losses();
}

#[test]
fn every_waiter_in_the_queue_gets_its_turn() {
    searches::queue();
}

#[test]
fn each_rule_of_the_queue_is_needed() {
    searches::rules_of_the_queue();
}

#[test]
fn fence_takes_precedence_over_the_lease_store() {
    searches::last_word();
}

#[test]
fn each_rule_of_precedence_is_needed() {
    searches::rules_of_the_last_word();
}

#[test]
fn promises_of_a_quorum_hold() {
    searches::quorum();
}

#[test]
fn each_rule_of_a_quorum_is_needed() {
    searches::rules_of_a_quorum();
}

#[test]
fn promises_of_leases_in_etcd_hold() {
    searches::etcd();
}

#[test]
fn each_rule_of_etcd_is_needed() {
    searches::rules_of_etcd();
}
