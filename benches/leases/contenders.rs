//! Common parts of all comparisons: the names of contenders, and the resources of their tasks.

use std::time::Duration;

pub const TASKS: usize = 16;

pub const OURS: &str = "tower-fence, Redis";
pub const IN_POSTGRES: &str = "tower-fence, Postgres";
pub const IN_POSTGRES_REUSE: &str = "tower-fence, Postgres, reuse";
pub const IN_ETCD: &str = "tower-fence, etcd";
pub const USUAL: &str = "SET NX, compare and delete";
pub const ADVISORY: &str = "advisory lock";
pub const ETCD: &str = "etcd, one session";

/// The TTL of a lock. A lock that is not released expires after this time.
pub const TTL: Duration = Duration::from_secs(60);

/// The maximum number of waiters. It is higher than the number of tasks of any table, because a
/// task may join the queue again before the next waiter has left the queue.
pub const MAX_WAITERS: usize = 5_000;

/// Returns the resources of one task. No other task uses them.
pub fn names(task: usize) -> Vec<String> {
    (0..64).map(|n| format!("resource-{task}-{n}")).collect()
}
