//! The models: every promise holds in all orders of steps, and breaks without each of the rules. The tables are in
//! `src/proof.md`.
//!
//! `cargo test --test model` searches small bounds; `-- --ignored` the large ones, which takes long.

use tower_fence_model::{
    fence::{floors::Floors, keys::Keys, several::Several, writes::Writes},
    quorum::{Bounds, Quorum},
    search::{World, each_rule_is_needed, holds},
};

#[test]
fn the_fence_holds() {
    holds(Writes::small());
}

#[test]
fn each_rule_of_the_fence_is_needed() {
    each_rule_is_needed::<Writes>();
}

#[test]
#[ignore]
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

#[test]
#[ignore]
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

#[test]
#[ignore]
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

#[test]
fn a_quorum_holds() {
    for bounds in Bounds::small() {
        holds(Quorum::new(bounds));
    }
}

#[test]
fn each_rule_of_a_quorum_is_needed() {
    each_rule_is_needed::<Quorum>();
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
