//! The search: many executions of a scenario, each in a different order of its steps.

use std::{cell::RefCell, panic, sync::Once, time::Duration};

use shuttle::{
    Config, FailurePersistence, MaxSteps, Runner,
    future::{block_on, spawn, yield_now},
    scheduler::{PctScheduler, RandomScheduler, Scheduler},
};

use crate::{
    model::{
        clock::{self, sleep},
        runtime,
    },
    mutants,
};

/// The number of random orders, in which any task may come next at each step.
const RANDOM: usize = 1_500;
/// The number of orders in which the tasks have priorities that change at few steps. Such orders
/// find failures that occur only if one task is late.
const BY_PRIORITY: usize = 1_500;
/// The number of changes of the priorities in an order.
const CHANGES: usize = 3;
/// The maximum number of times that all orders are repeated until a broken variant fails.
const ROUNDS: usize = 20;

/// Checks that a scenario succeeds in all orders that are tried.
pub fn holds<F: Future<Output = ()> + 'static>(scenario: fn() -> F) {
    mutants::turn_on(None);
    run(RandomScheduler::new(RANDOM), scenario);
    run(PctScheduler::new(CHANGES, BY_PRIORITY), scenario);
}

/// Checks that a scenario fails with a broken variant: by one of its assertions, or because a task
/// waits forever.
pub fn loses<F: Future<Output = ()> + 'static>(mutant: &'static str, scenario: fn() -> F) {
    mutants::turn_on(Some(mutant));
    let random = || run(RandomScheduler::new(RANDOM), scenario);
    let by_priority = || run(PctScheduler::new(CHANGES, BY_PRIORITY), scenario);
    note_panics();
    let lost = (0..ROUNDS)
        .any(|_| panic::catch_unwind(random).is_err() || panic::catch_unwind(by_priority).is_err());
    mutants::turn_on(None);
    assert!(lost, "the scenario holds with the broken variant: {mutant}");
    let why = FIRST_PANIC.take().expect("the panic was recorded");
    assert!(is_a_loss(&why), "{mutant}: {why}");
}

thread_local! {
    /// The message and the location of the first panic of an execution.
    static FIRST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Records the first panic of this thread from now on.
fn note_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            FIRST_PANIC.with_borrow_mut(|first| {
                first.get_or_insert_with(|| panic.to_string());
            });
            before(panic);
        }));
    });
    FIRST_PANIC.take();
}

/// Whether the panic came from a scenario, from the checks after a scenario, or from the scheduler
/// because no task can continue.
fn is_a_loss(panic: &str) -> bool {
    let promises = [
        "src/scenarios/",
        "interleavings/src/search.rs",
        "deadlock",
        "max_steps",
    ];
    promises.iter().any(|promise| panic.contains(promise))
}

fn run<F: Future<Output = ()> + 'static>(scheduler: impl Scheduler + 'static, scenario: fn() -> F) {
    let mut config = Config::new();
    // The bound finds a task that waits forever while other tasks continue.
    config.max_steps = MaxSteps::FailAfter(200_000);
    config.failure_persistence = FailurePersistence::None;
    config
        .ungraceful_shutdown_config
        .immediately_return_on_panic = true;
    config.stack_size = 1 << 18;
    Runner::new(scheduler, config).run(move || {
        clock::reset();
        runtime::reset();
        let passing = spawn(clock::pass());
        block_on(async {
            scenario().await;
            // Every task must end. If one does not, the search fails.
            while !runtime::is_idle() {
                sleep(Duration::from_millis(5)).await;
                yield_now().await;
            }
            clock::stop();
            passing.await.unwrap();
        });
    });
}
