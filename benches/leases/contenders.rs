//! What all races have in common: the names of contenders, and what each of their tasks locks.

use std::time::Duration;

pub const TASKS: usize = 16;

pub const OURS: &str = "tower-fence, Redis";
pub const IN_POSTGRES: &str = "tower-fence, Postgres";
pub const IN_POSTGRES_REUSE: &str = "tower-fence, Postgres, reuse";
pub const IN_ETCD: &str = "tower-fence, etcd";
pub const USUAL: &str = "SET NX, compare and delete";
pub const ADVISORY: &str = "advisory lock";
pub const ETCD: &str = "etcd, one session";

/// How long everything is locked that is not released.
pub const TTL: Duration = Duration::from_secs(60);

/// More than wait in any table: who has released gets in line again before the next one has left it.
pub const MAX_WAITERS: usize = 5_000;

/// The names of one task: nobody else uses them.
pub fn names(task: usize) -> Vec<String> {
    (0..64).map(|n| format!("resource-{task}-{n}")).collect()
}
