//! The models: every promise holds in all orders of steps, and breaks without each of the rules. The tables are in
//! `src/proof.md`.
//!
//! `cargo test --test model` searches small bounds; `-- --ignored` the large ones, which takes long.

use tower_fence_model::lease::{last_word, losses};

#[test]
fn tokens_survive_what_is_lost() {
    losses::hold(losses::small());
}

#[test]
fn each_rule_of_what_is_lost_is_needed() {
    losses::each_rule_is_needed();
}

#[test]
#[ignore = "takes long"]
fn tokens_survive_what_is_lost_in_large_bounds() {
    losses::hold(losses::large());
}

#[test]
fn the_last_word_holds() {
    last_word::hold(last_word::small());
}

#[test]
fn each_rule_of_the_last_word_is_needed() {
    last_word::each_rule_is_needed();
}

#[test]
#[ignore = "takes long"]
fn the_last_word_holds_in_large_bounds() {
    last_word::hold(last_word::large());
}
