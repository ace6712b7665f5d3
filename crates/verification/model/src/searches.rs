//! The searches of each model: of its small bounds, of its large bounds, and without each rule. A
//! generic search is compiled with optimizations only if this crate instantiates it.

use crate::{
    documented::are_documented,
    search::{World, each_rule_is_needed, hold, hold_depth_first, hold_in_bounds_of_rules},
};

fn promises<W: World>() {
    are_documented(W::NAME, &hold(W::worlds()));
    if W::BOUNDS_OF_RULES_ADD {
        are_documented(W::NAME, &[hold_in_bounds_of_rules::<W>()]);
    }
}

fn large_bounds<W: World>() {
    are_documented(W::NAME, &hold_depth_first(W::large_worlds()));
}

macro_rules! searches {
    ($($name:ident: $world:ty,)+) => {$(
        pub mod $name {
            pub fn promises() {
                super::promises::<$world>();
            }

            pub fn large_bounds() {
                super::large_bounds::<$world>();
            }

            pub fn rules() {
                super::each_rule_is_needed::<$world>();
            }
        }
    )+};
}

searches! {
    fence: crate::fence::writes::Writes,
    floors: crate::fence::floors::Floors,
    keys: crate::fence::keys::Keys,
    several_resources: crate::fence::several::Several,
    losses: crate::lease::losses::Losses,
    queue: crate::lease::queue::Queue,
    last_word: crate::lease::last_word::LastWord,
    quorum: crate::quorum::Quorum,
    etcd: crate::etcd::Etcd,
}
