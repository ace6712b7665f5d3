//! Replacements for `std`, `tokio`, `sqlx` and `redis`, with the same names. Each operation that
//! other tasks can observe begins with a step. At a step, the scheduler may let any other task
//! continue.

pub mod clock;
pub mod postgres;
pub mod redis;
pub mod runtime;
pub mod scripts;
pub mod sqlx;
pub mod std;
pub mod sync;
pub mod tokio;
pub mod transaction;

use shuttle::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Lets the scheduler choose the task that continues.
pub fn step() {
    AtomicBool::new(false).load(SeqCst);
}
