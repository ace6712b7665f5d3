//! Random walks through the model of a quorum, which real nodes execute.

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use tower_fence_model::quorum::{Quorum, Step};

use super::{
    broken::Change,
    quorum_nodes::Nodes,
    walk::{Drawn, Walk},
};
use crate::support::redis::{RedisServer, shared_node_urls};

/// An outcome that no walk reaches, because at least one renewal of each walk is not confirmed.
const NEVER: &str = "every renewal is confirmed";

/// An outcome that no walk reaches, because no walk takes an epoch for each of its restarts.
const NEVER_AFTER_RESTARTS: &str = "a lease is granted after all restarts";

/// The maximum length of a walk.
const STEPS: usize = 60;

/// Takes one walk from the initial state. The walk includes steps that the nodes must refuse.
async fn walk(nodes: &mut Nodes, world: Quorum, seed: u64, drawn: &mut Drawn) {
    let mut refused = StdRng::seed_from_u64(!seed);
    let mut walk = Walk::begin(&world, seed, drawn);
    nodes.begin(&walk.state).await;
    for _ in 0..STEPS {
        let mut steps = walk.possible();
        // If possible, half of the steps lead towards a grant.
        let is_grant = |step: &&Step| matches!(step, Step::Choose(..) | Step::Seal(..));
        let grants: Vec<_> = steps.iter().filter(is_grant).copied().collect();
        if !grants.is_empty() && !walk.random.random::<bool>() {
            steps = grants;
        }
        let Some(&step) = steps.choose(&mut walk.random) else {
            return;
        };
        let Some((next, answer)) = world.step(&walk.state, step) else {
            continue;
        };
        let before = walk.reach(step, next);
        assert!(nodes.take(&world, &before, step, answer).await);
        assert!(nodes.are_as(&walk.state).await);
        let state = &walk.state;
        if let Some(step) = world.refused_takes(state).choose(&mut refused) {
            let (same, answer) = world.step(state, *step).unwrap();
            assert!(same == *state, "{step:?}");
            let says_so = nodes.take(&world, state, *step, answer).await;
            assert!(says_so && nodes.are_as(state).await, "{step:?}");
        }
    }
}

#[tokio::test]
async fn nodes_that_lose_keys_match_the_model() {
    lose_keys(None).await;
}

/// Runs the walks with the real scripts, or with a broken one.
pub async fn lose_keys(change: Option<Change>) {
    let urls = shared_node_urls();
    let mut drawn = Drawn::default();
    for seed in 0..15 {
        for world in Quorum::walks() {
            let mut nodes = Nodes::of(&urls, vec![], change).await;
            walk(&mut nodes, world, seed, &mut drawn).await;
        }
    }
    drawn.are_all_but(&[NEVER]);
}

#[tokio::test]
async fn restarted_nodes_match_the_model() {
    let mut own = vec![];
    for _ in 0..3 {
        own.push(RedisServer::start(&["--appendonly", "yes", "--appendfsync", "no"]).await);
    }
    let mut drawn = Drawn::default();
    let urls: Vec<_> = own.iter().map(RedisServer::url).collect();
    // With these seeds, the walks reach all other outcomes.
    for seed in 10..15 {
        for world in Quorum::walks() {
            let mut nodes = Nodes::of(&urls, own, None).await;
            walk(&mut nodes, world.with_restarts(), seed, &mut drawn).await;
            own = nodes.into_own();
        }
    }
    drawn.are_all_but(&[NEVER_AFTER_RESTARTS, NEVER]);
}
