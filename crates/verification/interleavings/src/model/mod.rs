//! What the files are compiled against in place of `std`, `tokio`, `sqlx` and `redis`: the same names, with a step before each
//! operation that other tasks can notice. At a step the scheduler may let any other task go on.

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

/// Lets the scheduler choose who goes on.
pub fn step() {
    AtomicBool::new(false).load(SeqCst);
}
