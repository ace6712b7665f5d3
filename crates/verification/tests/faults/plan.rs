//! Which faults come when: drawn from a seed, each kind as often as every other, and what any Redis may do twice as often.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fault {
    ClientsFrozen,
    ClientsKilled,
    ServiceFrozen,
    ServiceKilled,
    ServiceCutOff,
    ServiceSlow,
    /// Requests arrive, and answers are lost.
    ServiceWithoutAnswer,
    /// Requests and answers are held back, and arrive late.
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
    /// A replica takes the place of a master that lives.
    NodePromoted,
    RollingRestart,
}

use Fault::*;

/// What any store is under, what each Redis is, and what those are that are reached by a link of the run's own.
const ANYWHERE: [Fault; 28] = [
    ClientsFrozen,
    ClientsKilled,
    ServiceFrozen,
    ServiceKilled,
    ServiceCutOff,
    ServiceSlow,
    ServiceWithoutAnswer,
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
    RollingRestart,
];
const IN_REDIS: [Fault; 5] = [
    NodeFrozen,
    NodeKilled,
    NodeFromOldFile,
    NodeFlushed,
    NodeEvicts,
];
/// A node of three is frozen or killed, all come back from a snapshot, or an operator deletes all keys.
const IN_ETCD: [Fault; 4] = [NodeFrozen, NodeKilled, NodeFromOldFile, NodeFlushed];
const ON_LINKS: [Fault; 4] = [NodeCutOff, NodeSlow, NodeWithoutAnswer, NodeSilent];

/// One fault, from when on and for how long after the beginning, and which of several servers it is at.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    pub at: Duration,
    pub fault: Fault,
    pub lasts: Duration,
    pub choice: usize,
}

impl Planned {
    /// The end of a run without faults.
    pub const fn nothing(at: Duration) -> Self {
        let (fault, lasts) = (Checkpoint, Duration::ZERO);
        Self {
            at,
            fault,
            lasts,
            choice: 0,
        }
    }
}

/// The faults of a run of this length.
pub fn plan(seed: u64, store: &str, length: Duration) -> Vec<Planned> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut kinds = ANYWHERE.to_vec();
    if store == "etcd" {
        kinds.extend(IN_ETCD.repeat(2));
    } else if store != "postgres" {
        // As often as those of Postgres, which are many.
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
            fault: deck.pop().expect("it was filled"),
            lasts: Duration::from_millis(random.random_range(100..2_000)),
            choice: random.random_range(0..1_000),
        });
    }
}
