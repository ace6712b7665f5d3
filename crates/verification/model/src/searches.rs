//! The searches that `crates/verification/tests/model.rs` runs. A generic search is compiled with
//! optimizations only if this crate instantiates it.

use crate::{
    documented,
    etcd::Etcd,
    fence::{floors::Floors, keys::Keys, several::Several, writes::Writes},
    lease::{last_word::LastWord, losses::Losses, queue::Queue},
    quorum::Quorum,
    search::{World, each_rule_is_needed, hold, hold_depth_first, hold_in_bounds_of_rules},
};

/// Compares the numbers of states with the documented numbers.
fn are_documented<W: World>(states: &[usize]) {
    documented::are_documented(W::NAME, states);
}

/// Compares the total number of states with the documented number.
fn total_is_documented<W: World>(states: &[usize]) {
    are_documented::<W>(&[states.iter().sum()]);
}

pub fn fence() {
    total_is_documented::<Writes>(&hold(Writes::worlds()));
    hold_in_bounds_of_rules::<Writes>();
}

pub fn fence_in_large_bounds() {
    total_is_documented::<Writes>(&hold_depth_first(Writes::large_worlds()));
}

pub fn rules_of_the_fence() {
    each_rule_is_needed::<Writes>();
}

pub fn floors() {
    are_documented::<Floors>(&hold(Floors::worlds()));
    hold_in_bounds_of_rules::<Floors>();
}

pub fn floors_in_large_bounds() {
    are_documented::<Floors>(&hold_depth_first(Floors::large_worlds()));
}

pub fn rules_of_floors() {
    each_rule_is_needed::<Floors>();
}

pub fn keys() {
    total_is_documented::<Keys>(&hold(Keys::worlds()));
    hold_in_bounds_of_rules::<Keys>();
}

pub fn keys_in_large_bounds() {
    total_is_documented::<Keys>(&hold_depth_first(Keys::large_worlds()));
}

pub fn rules_of_keys() {
    each_rule_is_needed::<Keys>();
}

pub fn several_resources() {
    are_documented::<Several>(&hold(Several::worlds()));
    hold_in_bounds_of_rules::<Several>();
}

pub fn rules_of_several_resources() {
    each_rule_is_needed::<Several>();
}

pub fn losses() {
    total_is_documented::<Losses>(&hold(Losses::worlds()));
    are_documented::<Losses>(&[hold_in_bounds_of_rules::<Losses>()]);
}

pub fn losses_in_large_bounds() {
    are_documented::<Losses>(&hold_depth_first(Losses::large_worlds()));
}

pub fn rules_of_losses() {
    each_rule_is_needed::<Losses>();
}

pub fn queue() {
    are_documented::<Queue>(&hold(Queue::worlds()));
}

pub fn rules_of_the_queue() {
    each_rule_is_needed::<Queue>();
}

pub fn last_word() {
    total_is_documented::<LastWord>(&hold(LastWord::worlds()));
    are_documented::<LastWord>(&[hold_in_bounds_of_rules::<LastWord>()]);
}

pub fn last_word_in_large_bounds() {
    total_is_documented::<LastWord>(&hold_depth_first(LastWord::large_worlds()));
}

pub fn rules_of_the_last_word() {
    each_rule_is_needed::<LastWord>();
}

pub fn quorum() {
    // Some bounds of rules are too large for a complete search.
    are_documented::<Quorum>(&hold(Quorum::worlds()));
}

pub fn quorum_in_large_bounds() {
    are_documented::<Quorum>(&hold_depth_first(Quorum::large_worlds()));
}

pub fn rules_of_a_quorum() {
    each_rule_is_needed::<Quorum>();
}

pub fn etcd() {
    total_is_documented::<Etcd>(&hold(Etcd::worlds()));
    are_documented::<Etcd>(&[hold_in_bounds_of_rules::<Etcd>()]);
}

pub fn etcd_in_large_bounds() {
    are_documented::<Etcd>(&hold_depth_first(Etcd::large_worlds()));
}

pub fn rules_of_etcd() {
    each_rule_is_needed::<Etcd>();
}
