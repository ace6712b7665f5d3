//! What `tests/model.rs` runs. The searches are generic, and built with optimizations only where they are named in this
//! crate.

use crate::{
    fence::{floors::Floors, keys::Keys, several::Several, writes::Writes},
    lease::{last_word, losses},
    quorum::{Bounds, Quorum, Rule},
    search::{World, each_rule_is_needed, holds},
};

pub fn fence() {
    holds(Writes::small());
}

pub fn fence_in_large_bounds() {
    holds(Writes::large());
}

pub fn rules_of_the_fence() {
    each_rule_is_needed::<Writes>();
}

pub fn floors() {
    holds(Floors::small());
}

pub fn floors_in_large_bounds() {
    holds(Floors::large());
}

pub fn rules_of_floors() {
    each_rule_is_needed::<Floors>();
}

pub fn keys() {
    holds(Keys::small());
}

pub fn keys_in_large_bounds() {
    holds(Keys::large());
}

pub fn rules_of_keys() {
    each_rule_is_needed::<Keys>();
}

pub fn several_resources() {
    holds(Several::small());
}

pub fn rules_of_several_resources() {
    each_rule_is_needed::<Several>();
}

pub fn losses() {
    losses::hold(losses::small());
}

pub fn losses_in_large_bounds() {
    losses::hold(losses::large());
}

pub fn rules_of_losses() {
    losses::each_rule_is_needed();
}

pub fn last_word() {
    last_word::hold(last_word::small());
}

pub fn last_word_in_large_bounds() {
    last_word::hold(last_word::large());
}

pub fn rules_of_the_last_word() {
    last_word::each_rule_is_needed();
}

pub fn quorum() {
    for bounds in Bounds::small() {
        holds(Quorum::new(bounds));
    }
}

pub fn quorum_in_large_bounds() {
    for bounds in Bounds::large() {
        holds(Quorum::new(bounds));
    }
}

/// But for those in which a first attempt is granted while a second one of the same lease gives up: both may have chosen one
/// token, and the second one takes it back from a node that it has taken and not sealed.
pub fn quorum_in_the_bounds_of_each_rule() {
    for &rule in Quorum::RULES {
        if rule != Rule::CleanUpOfAttempt {
            holds(Quorum::new(Bounds::without(rule)));
        }
    }
}

pub fn rules_of_a_quorum() {
    each_rule_is_needed::<Quorum>();
}
