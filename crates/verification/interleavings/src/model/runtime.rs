//! Runtimes. A task belongs to the runtime of the task that spawned it, and is dropped when this
//! runtime ends.

use std::{cell::RefCell, collections::HashMap, mem};

use shuttle::{
    current::{self, TaskId},
    future,
};

pub use shuttle::future::{AbortHandle, JoinHandle};

#[derive(Default)]
struct Runtimes {
    ended: Vec<bool>,
    tasks: Vec<(usize, AbortHandle)>,
    /// The runtime of each task. Tasks that are not listed belong to the first runtime.
    of_tasks: HashMap<TaskId, usize>,
}

thread_local! {
    static RUNTIMES: RefCell<Runtimes> = RefCell::default();
}

fn with<T>(f: impl FnOnce(&mut Runtimes) -> T) -> T {
    RUNTIMES.with(|runtimes| f(&mut runtimes.borrow_mut()))
}

pub fn reset() {
    let ended = vec![false];
    let before = with(|runtimes| {
        mem::replace(
            runtimes,
            Runtimes {
                ended,
                ..Runtimes::default()
            },
        )
    });
    drop(before);
}

/// The handle of a runtime.
#[derive(Clone, Copy, Debug)]
pub struct Handle(usize);

#[derive(Debug)]
pub struct TryCurrentError;

impl Handle {
    /// Creates another runtime.
    pub fn new() -> Self {
        with(|runtimes| {
            runtimes.ended.push(false);
            Self(runtimes.ended.len() - 1)
        })
    }

    /// Returns the first runtime, which does not end. Servers run on it, so they complete requests
    /// even if the runtime of the caller has ended.
    pub const fn first() -> Self {
        Self(0)
    }

    pub fn try_current() -> Result<Self, TryCurrentError> {
        Ok(Self::current())
    }

    pub fn current() -> Self {
        let me = current::me();
        Self(with(|runtimes| {
            runtimes.of_tasks.get(&me).copied().unwrap_or(0)
        }))
    }

    /// Does nothing, because every task of a scenario is within a runtime.
    pub const fn enter(&self) {}

    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let runtime = self.0;
        if with(|runtimes| runtimes.ended[runtime]) {
            // The runtime has ended, so it drops the task immediately.
            drop(task);
            let cancelled = future::spawn(std::future::pending());
            cancelled.abort();
            return cancelled;
        }
        let spawned = future::spawn(async move {
            with(|runtimes| runtimes.of_tasks.insert(current::me(), runtime));
            task.await
        });
        let handle = spawned.abort_handle();
        with(|runtimes| runtimes.tasks.push((runtime, handle)));
        spawned
    }

    /// Ends the runtime, and drops its tasks.
    pub fn end(&self) {
        let tasks = with(|runtimes| {
            runtimes.ended[self.0] = true;
            let of_this = |(runtime, _): &&(usize, AbortHandle)| *runtime == self.0;
            let tasks = runtimes.tasks.iter().filter(of_this);
            tasks.map(|(_, task)| task.clone()).collect::<Vec<_>>()
        });
        tasks.iter().for_each(AbortHandle::abort);
    }
}

/// Whether all spawned tasks of all runtimes have ended.
pub fn is_idle() -> bool {
    with(|runtimes| runtimes.tasks.iter().all(|(_, task)| task.is_finished()))
}

pub fn spawn<F>(task: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    Handle::current().spawn(task)
}
