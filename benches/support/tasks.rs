//! Operations that several tasks repeat at the same time.

use std::time::Duration;

use tokio::{runtime::Runtime, time::Instant};

use super::{cpu::Cpu, options::Window, rounds::Sample};

/// An operation that one task repeats.
pub trait Operation: Send + 'static {
    fn run(&mut self) -> impl Future<Output = Outcome> + Send;
}

#[derive(Clone, Copy, PartialEq)]
pub enum Outcome {
    Done,
    /// The operation was refused, as expected, and is counted separately.
    Refused,
}

/// Returns a function that runs each turn with the same operations.
pub fn turns<O: Operation>(
    runtime: &Runtime,
    mut operations: Vec<O>,
) -> impl FnMut(Window) -> Sample {
    move |window| {
        let running = run(std::mem::take(&mut operations), window);
        let (sample, given_back) = runtime.block_on(running);
        operations = given_back;
        sample
    }
}

/// Runs each operation in its own task during the window, and returns the operations.
pub async fn run<O: Operation>(operations: Vec<O>, window: Window) -> (Sample, Vec<O>) {
    let from = Instant::now() + window.warm_up;
    let until = from + window.measured;
    let tasks: Vec<_> = operations
        .into_iter()
        .map(|operation| tokio::spawn(repeat(operation, from, window.measured)))
        .collect();
    tokio::time::sleep_until(from).await;
    let before = Cpu::now();
    tokio::time::sleep_until(until).await;
    let used = Cpu::now() - before;
    let (mut sum, mut operations) = (Sample::new(window.measured), vec![]);
    sum.cpu = Some(used);
    for task in tasks {
        let (sample, operation) = task.await.expect("an operation failed");
        sum.latencies
            .add(&sample.latencies)
            .expect("the same bounds");
        sum.refused += sample.refused;
        sum.done += sample.done;
        operations.push(operation);
    }
    (sum, operations)
}

async fn repeat<O: Operation>(mut operation: O, from: Instant, measured: Duration) -> (Sample, O) {
    let until = from + measured;
    let mut sample = Sample::new(measured);
    let mut began = Instant::now();
    while began < until {
        let outcome = operation.run().await;
        let ended = Instant::now();
        let within = from <= ended && ended < until;
        match outcome {
            Outcome::Refused => sample.refused += u64::from(within),
            Outcome::Done => {
                sample.done += 1;
                if within {
                    let took = u64::try_from((ended - began).as_nanos());
                    sample.latencies.saturating_record(took.unwrap_or(u64::MAX));
                }
            }
        }
        began = ended;
    }
    (sample, operation)
}
