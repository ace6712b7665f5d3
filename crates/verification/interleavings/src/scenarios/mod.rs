//! The scenarios, each with the promises that it checks.

pub mod announced;
pub mod direct;
pub mod flight;
pub mod loss;
pub mod memory;
pub mod queue;
pub mod reuse;
pub mod slot;
pub mod waiters;

use std::time::Duration;

use crate::{
    epochs::{Epoch, EpochFuture, Epochs, SourceId},
    model::runtime::{JoinHandle, spawn},
    token::Resource,
};
use shuttle::rand::{Rng, thread_rng};

/// A time that is longer than any execution.
const FOR_EVER: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);

/// A source of epochs that always assigns `at_least`.
struct Source;

impl Epochs for Source {
    fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
        Box::pin(async move { Ok(at_least) })
    }

    fn report_epoch(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
        Box::pin(async move { Ok(seen) })
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        Box::pin(async { Ok(SourceId::new("source").unwrap()) })
    }
}

fn resource() -> Resource {
    Resource::new("sku-1").unwrap()
}

/// Returns one of these numbers of milliseconds, at random.
fn some_ms<const N: usize>(choices: [u64; N]) -> Duration {
    Duration::from_millis(choices[thread_rng().gen_range(0..N)])
}

/// Returns true with a probability of one half.
fn by_chance() -> bool {
    thread_rng().gen_bool(0.5)
}

/// Spawns this number of tasks.
fn tasks<F: Future<Output = ()> + Send + 'static>(
    count: usize,
    task: impl Fn(usize) -> F,
) -> Vec<JoinHandle<()>> {
    (0..count).map(|n| spawn(task(n))).collect()
}

async fn all(tasks: Vec<JoinHandle<()>>) {
    for task in tasks {
        task.await.unwrap();
    }
}
