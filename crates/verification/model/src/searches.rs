//! The searches that `crates/verification/tests/model.rs` runs. A generic search is compiled with
//! optimizations only if this crate instantiates it.

use stateright::{Checker, Model};

use crate::{
    documented,
    etcd::Etcd,
    exhaust,
    fence::{floors::Floors, keys::Keys, several::Several, writes::Writes},
    lease::{last_word::LastWord, losses::Losses, queue::Queue},
    quorum::Quorum,
    search::{World, each_rule_is_needed, hold, hold_in_bounds_of_rules},
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
    total_is_documented::<Writes>(&exhaust::hold(Writes::large_worlds()));
}

pub fn rules_of_the_fence() {
    each_rule_is_needed::<Writes>();
}

pub fn floors() {
    are_documented::<Floors>(&hold(Floors::worlds()));
    hold_in_bounds_of_rules::<Floors>();
}

pub fn floors_in_large_bounds() {
    are_documented::<Floors>(&exhaust::hold(Floors::large_worlds()));
}

pub fn rules_of_floors() {
    each_rule_is_needed::<Floors>();
}

pub fn keys() {
    total_is_documented::<Keys>(&hold(Keys::worlds()));
    hold_in_bounds_of_rules::<Keys>();
}

pub fn keys_in_large_bounds() {
    total_is_documented::<Keys>(&exhaust::hold(Keys::large_worlds()));
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
    are_documented::<Losses>(&exhaust::hold(Losses::large_worlds()));
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
    total_is_documented::<LastWord>(&exhaust::hold(LastWord::large_worlds()));
}

pub fn rules_of_the_last_word() {
    each_rule_is_needed::<LastWord>();
}

pub fn quorum() {
    // Some bounds of rules are too large for a complete search.
    are_documented::<Quorum>(&hold(Quorum::worlds()));
}

pub fn quorum_in_large_bounds() {
    are_documented::<Quorum>(&exhaust::hold(Quorum::large_worlds()));
}

pub fn rules_of_a_quorum() {
    each_rule_is_needed::<Quorum>();
}

pub fn etcd() {
    total_is_documented::<Etcd>(&hold(Etcd::worlds()));
    are_documented::<Etcd>(&[hold_in_bounds_of_rules::<Etcd>()]);
}

pub fn etcd_in_large_bounds() {
    are_documented::<Etcd>(&exhaust::hold(Etcd::large_worlds()));
}

pub fn rules_of_etcd() {
    each_rule_is_needed::<Etcd>();
}

/// Checks that both searches find the same states, and that both detect each rule that is left out.
pub fn searches_agree() {
    for world in Keys::worlds() {
        let breadth_first = world.clone().checker().spawn_bfs().join();
        let searched = exhaust::search(&world).expect("every promise holds");
        assert_eq!(searched.states, breadth_first.unique_state_count());
        assert_eq!(searched.never, None);
    }
    for &rule in Keys::RULES {
        let world = Keys::in_bounds_of(rule).leave_out(rule);
        let broken = exhaust::search(&world).err().expect("the rule is needed");
        assert!(is_broken(&world, &broken), "{rule}: {broken}");
    }
}

/// Executes the steps again, and checks that they break the promise.
fn is_broken<W: World>(world: &W, broken: &exhaust::Broken<W::Action>) -> bool {
    let mut state = world.init_states().remove(0);
    for step in &broken.steps {
        let next = world.next_state(&state, step.clone());
        state = next.expect("the step can be taken");
    }
    let properties = world.properties();
    let promise = properties
        .iter()
        .find(|property| property.name == broken.promise);
    promise.is_some_and(|promise| !(promise.condition)(world, &state))
}
