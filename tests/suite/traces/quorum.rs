//! Walks through the model of a quorum, taken by real nodes.

use rand::{RngExt, SeedableRng, rngs::StdRng};
use tower_fence_model::quorum::{Bounds, Quorum, Step};

use super::quorum_nodes::Nodes;
use crate::support::redis::{RedisServer, shared_node_urls};

/// The longest walk.
const STEPS: usize = 60;

/// One walk from the beginning, by this seed. Steps that change nothing are taken, too: the nodes refuse them.
async fn walk(nodes: &mut Nodes, bounds: Bounds, seed: u64) {
    let world = Quorum::new(bounds);
    let mut random = StdRng::seed_from_u64(seed);
    let mut state = world.begin();
    let mut story = vec![];
    for _ in 0..STEPS {
        let steps = world.steps(&state);
        if steps.is_empty() {
            return;
        }
        // Half of the steps are on the way to a grant, as far as there are such.
        let is_grant = |step: &&Step| matches!(step, Step::Choose(..) | Step::Seal(..));
        let grants: Vec<_> = steps.iter().filter(is_grant).copied().collect();
        let steps = match grants.is_empty() || random.random() {
            true => steps,
            false => grants,
        };
        let step = steps[random.random_range(0..steps.len())];
        let Some((next, answer)) = world.step(&state, step) else {
            continue;
        };
        story.push(step);
        let says_so = nodes.take(&world, &state, step, answer).await;
        let is_so = says_so && nodes.are_as(&next).await;
        assert!(is_so, "by seed {seed}, after {story:#?}");
        state = next;
    }
}

#[tokio::test]
async fn nodes_that_lose_keys_go_the_way_of_the_model() {
    let urls = shared_node_urls();
    for seed in 0..15 {
        for bounds in Bounds::walks() {
            let mut nodes = Nodes::of(&urls, vec![]).await;
            walk(&mut nodes, bounds, seed).await;
        }
    }
}

#[tokio::test]
async fn nodes_that_are_restarted_go_the_way_of_the_model() {
    let mut own = vec![];
    for _ in 0..3 {
        own.push(RedisServer::start(&["--appendonly", "yes", "--appendfsync", "no"]).await);
    }
    let urls: Vec<_> = own.iter().map(RedisServer::url).collect();
    for seed in 0..5 {
        for bounds in Bounds::walks() {
            let mut nodes = Nodes::of(&urls, own).await;
            walk(&mut nodes, bounds.with_restarts(), seed).await;
            own = nodes.into_own();
        }
    }
}
