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

use ::std::time::Duration;

use shuttle::{
    rand::{Rng, thread_rng},
    sync::atomic::{AtomicBool, Ordering::SeqCst},
};

use crate::{lease::Held, token::Token};

/// The duration that is reported for a held lease. It is longer than any execution.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// Lets the scheduler choose the task that continues.
pub fn step() {
    AtomicBool::new(false).load(SeqCst);
}

/// Delays a statement or its answer.
async fn pause() {
    step();
    let ms = thread_rng().gen_range(0..2);
    clock::sleep(Duration::from_millis(ms)).await;
}

/// Returns the view of a held lease.
fn held(token: i64, waiters: usize) -> Held {
    Held {
        token: Token::new(token).unwrap(),
        owner: None,
        ttl: FOR_EVER,
        waiters: waiters as u64,
        granted_at: None,
    }
}
