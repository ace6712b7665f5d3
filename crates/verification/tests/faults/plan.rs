//! The plan of the faults of a run, drawn from a seed. All kinds are equally frequent, except that
//! the faults of Redis and etcd servers are twice as frequent.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

macro_rules! faults {
    ($($(#[$doc:meta])* $fault:ident,)+) => {
        /// A kind of fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Fault {
            $($(#[$doc])* $fault,)+
        }

        const ALL: &[Fault] = &[$(Fault::$fault,)+];
    };
}

faults! {
    ClientsFrozen,
    ClientsKilled,
    ServiceFrozen,
    ServiceKilled,
    ServiceCutOff,
    ServiceSlow,
    /// Requests arrive, but responses are lost.
    ServiceWithoutAnswer,
    /// Requests and responses are held back, and arrive late.
    ServiceSilent,
    ServiceClockJumps,
    PoolerFrozen,
    PoolerKilled,
    PostgresFrozen,
    PostgresKilled,
    PostgresRestarted,
    PostgresClockJumps,
    PostgresCutOff,
    PostgresSlow,
    PostgresWithoutAnswer,
    PostgresSilent,
    BackendFrozen,
    BackendKilled,
    BackendsTerminated,
    BackendsCanceled,
    Checkpoint,
    NoSpace,
    FailoverSynchronous,
    FailoverAsynchronous,
    NodeFrozen,
    NodeKilled,
    NodeFromOldFile,
    NodeFlushed,
    NodeEvicts,
    NodeCutOff,
    NodeSlow,
    NodeWithoutAnswer,
    NodeSilent,
    NodeClockJumps,
    /// A replica is promoted while its master is still running.
    NodePromoted,
    RollingRestart,
}

use Fault::*;

/// The faults of nodes. `NodeFromOldFile` restores all nodes of etcd from a snapshot.
const IN_NODES: [Fault; 5] = [
    NodeFrozen,
    NodeKilled,
    NodeFromOldFile,
    NodeFlushed,
    NodeEvicts,
];
/// The faults of nodes that the services reach through a proxy.
const ON_LINKS: [Fault; 5] = [
    NodeCutOff,
    NodeSlow,
    NodeWithoutAnswer,
    NodeSilent,
    NodeClockJumps,
];

/// A fault, with its duration, and a number that chooses one of several servers.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    pub fault: Fault,
    pub lasts: Duration,
    pub choice: usize,
}

/// Draws the faults of a run of this length, each with its start from the beginning of the run.
pub fn plan(seed: u64, store: &str, length: Duration) -> Vec<(Duration, Planned)> {
    let mut random = StdRng::seed_from_u64(seed);
    // The faults of nodes depend on the store.
    let is_anywhere = |fault: &Fault| !(NodeFrozen..=NodePromoted).contains(fault);
    let mut kinds: Vec<_> = ALL.iter().copied().filter(is_anywhere).collect();
    // The first list is added twice, because Postgres has many more kinds of faults.
    let (twice, once): (&[Fault], &[Fault]) = match store {
        "redis" | "quorum" => (&IN_NODES, &ON_LINKS),
        "sentinel" | "cluster" => (&IN_NODES, &[NodePromoted]),
        // Etcd evicts no keys, and no clock of its nodes jumps.
        "etcd" => (&IN_NODES[..4], &ON_LINKS[..4]),
        _ => (&[], &[]),
    };
    kinds.extend([twice, twice, once].concat());
    let (mut planned, mut deck) = (vec![], vec![]);
    let mut at = Duration::ZERO;
    loop {
        at += Duration::from_millis(random.random_range(300..2_500));
        if at >= length {
            return planned;
        }
        if deck.is_empty() {
            deck.clone_from(&kinds);
            deck.shuffle(&mut random);
        }
        let fault = Planned {
            fault: deck.pop().expect("the deck was refilled"),
            lasts: Duration::from_millis(random.random_range(100..2_000)),
            choice: random.random_range(0..1_000),
        };
        planned.push((at, fault));
    }
}
