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

/// The additional faults of stores in Redis. The lists below are those of stores in etcd, and of
/// stores that the services reach through a proxy.
const IN_REDIS: [Fault; 5] = [
    NodeFrozen,
    NodeKilled,
    NodeFromOldFile,
    NodeFlushed,
    NodeEvicts,
];
/// Faults of etcd: a node is frozen or killed, all nodes are restored from a snapshot, or an
/// operator deletes all keys.
const IN_ETCD: [Fault; 4] = [NodeFrozen, NodeKilled, NodeFromOldFile, NodeFlushed];
const ON_LINKS: [Fault; 4] = [NodeCutOff, NodeSlow, NodeWithoutAnswer, NodeSilent];

/// A fault, with its start (from the beginning of the run), its duration, and a number that chooses
/// one of several servers.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    pub at: Duration,
    pub fault: Fault,
    pub lasts: Duration,
    pub choice: usize,
}

impl Planned {
    /// A harmless entry that sets the end of a run without faults.
    pub const fn nothing(at: Duration) -> Self {
        Self {
            at,
            fault: Checkpoint,
            lasts: Duration::ZERO,
            choice: 0,
        }
    }
}

/// Draws the faults of a run of this length.
pub fn plan(seed: u64, store: &str, length: Duration) -> Vec<Planned> {
    let mut random = StdRng::seed_from_u64(seed);
    // The faults of nodes depend on the store.
    let is_anywhere = |fault: &Fault| !(NodeFrozen..=NodePromoted).contains(fault);
    let mut kinds: Vec<_> = ALL.iter().copied().filter(is_anywhere).collect();
    if store == "etcd" {
        kinds.extend(IN_ETCD.repeat(2));
    } else if store != "postgres" {
        // These faults are added twice, because Postgres has many more kinds of faults.
        kinds.extend(IN_REDIS.repeat(2));
    }
    if matches!(store, "redis" | "quorum") {
        kinds.extend(ON_LINKS);
        kinds.push(NodeClockJumps);
    }
    if store == "etcd" {
        kinds.extend(ON_LINKS);
    }
    if matches!(store, "sentinel" | "cluster") {
        kinds.push(NodePromoted);
    }
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
        planned.push(Planned {
            at,
            fault: deck.pop().expect("the deck was refilled"),
            lasts: Duration::from_millis(random.random_range(100..2_000)),
            choice: random.random_range(0..1_000),
        });
    }
}
