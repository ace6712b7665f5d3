//! What all races have in common: the names of contenders, and what each of their tasks locks.

use std::time::Duration;

pub const TASKS: usize = 16;

pub const OURS: &str = "tower-fence";
pub const USUAL: &str = "SET NX, compare and delete";

/// How long everything is locked that is not released.
pub const TTL: Duration = Duration::from_secs(60);

/// The names of one task: nobody else uses them.
pub fn names(task: usize) -> Vec<String> {
    (0..64).map(|n| format!("resource-{task}-{n}")).collect()
}
