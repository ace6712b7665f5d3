//! Acquire and release on a quorum of Redis nodes, compared with one node and with Redlock, which
//! has no tokens. There are 16 concurrent tasks with separate resources.

use futures_util::future::join_all;
use tower_fence::Resource;
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use crate::{
    contenders::{OURS, TTL},
    in_process::{Lock, in_tasks},
    store::Store,
    support::{
        options::Options,
        program::Program,
        report::Report,
        rounds::{self, Contender},
    },
    usual::UsualLock,
};

const REDLOCK: &str = "Redlock, 3 nodes";

pub fn race(store: &Store, options: &Options, report: &mut Report) {
    let title = "Acquire and release, 16 tasks, on a quorum";
    if !options.wants(title) {
        return;
    }
    let nodes: Vec<_> = (0..5).map(|_| Program::redis()).collect();
    let (three, five) = (&nodes[..3], &nodes[..]);
    let runtime = &store.runtime;
    let redlock = |nodes: &[Program]| in_tasks(runtime, &Redlock::connect(store, nodes));
    let quorum = |nodes: &[Program], prefix| in_tasks(runtime, &leases(store, nodes, prefix));
    let contenders = vec![
        Contender::new(REDLOCK, redlock(three)),
        Contender::new("Redlock, 5 nodes", redlock(five)),
        Contender::new("tower-fence, 3 nodes", quorum(three, "three")),
        Contender::new("tower-fence, 5 nodes", quorum(five, "five")),
        Contender::new(OURS, in_tasks(runtime, &store.leases("one"))),
    ];
    let outcomes = rounds::run(title, REDLOCK, contenders, options);
    store.assert_all_free();
    nodes.iter().for_each(|node| store.assert_free(node));
    report.contenders(title, REDLOCK, &outcomes);
}

fn leases(store: &Store, nodes: &[Program], prefix: &str) -> QuorumLeases {
    let urls: Vec<_> = nodes
        .iter()
        .map(|node| format!("redis://{}", node.addr))
        .collect();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let builder = QuorumLeasesBuilder::new(store.fence()).key_prefix(prefix);
    // The nodes share two cores with all other processes, so they need a long timeout.
    let builder = builder.node_timeout(std::time::Duration::from_secs(2));
    let leases = store.runtime.block_on(builder.connect(&urls));
    leases.expect("the nodes answer")
}

/// The usual lock on a majority of nodes: Redlock, which has no token.
#[derive(Clone)]
struct Redlock(Vec<UsualLock>);

impl Redlock {
    fn connect(store: &Store, nodes: &[Program]) -> Self {
        let connections = nodes.iter().map(|node| store.connect(node));
        Self(connections.map(UsualLock::new).collect())
    }
}

impl Lock for Redlock {
    async fn acquire_and_release(&self, resource: &Resource) {
        let (nodes, name) = (&self.0, resource.as_str());
        let ids = join_all(nodes.iter().map(|node| node.try_lock(name, TTL))).await;
        let held = ids.iter().flatten().count();
        assert!(held > nodes.len() / 2, "it is free");
        let unlocking = nodes
            .iter()
            .zip(ids)
            .filter_map(|(node, id)| Some((node, id?)));
        join_all(unlocking.map(|(node, id)| node.unlock(name, id))).await;
    }
}
