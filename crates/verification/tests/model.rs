//! Searches of the models: each promise holds in all orders of the steps, and a promise breaks if
//! any one of the rules is left out. The tables are in `src/proof.md`.
//!
//! These tests search small bounds. `cargo run --release -p tower-fence-model` searches large ones.

use tower_fence_model::searches;

macro_rules! searches {
    ($($world:ident: $promises:ident, $rules:ident;)+) => {$(
        #[test]
        fn $promises() {
            searches::$world::promises();
        }

        #[test]
        fn $rules() {
            searches::$world::rules();
        }
    )+};
}

searches! {
    fence: promises_of_the_fence_hold, each_rule_of_the_fence_is_needed;
    floors: promises_of_floors_hold, each_rule_of_floors_is_needed;
    keys: promises_of_idempotency_keys_hold, each_rule_of_idempotency_keys_is_needed;
    several_resources: promises_of_several_resources_hold, each_rule_of_several_resources_is_needed;
    losses: token_promises_hold_despite_data_loss, each_rule_of_data_loss_is_needed;
    queue: every_waiter_in_the_queue_gets_its_turn, each_rule_of_the_queue_is_needed;
    last_word: fence_takes_precedence_over_the_lease_store, each_rule_of_precedence_is_needed;
    quorum: promises_of_a_quorum_hold, each_rule_of_a_quorum_is_needed;
    etcd: promises_of_leases_in_etcd_hold, each_rule_of_etcd_is_needed;
}
