//! Acquire and release without HTTP: 16 concurrent tasks with separate resources.

use std::ops::Range;

use tokio::runtime::Runtime;
use tower_fence::{
    Resource,
    lease::{Acquire, Leases},
};

use crate::{
    advisory::AdvisoryLock,
    contenders::{ADVISORY, OURS, TASKS, TTL, USUAL, names},
    postgres_store::PostgresStore,
    store::Store,
    support::{
        load::{self, Answered, Client},
        options::{Options, Window},
        report::Report,
        rounds::{self, Contender, Sample},
        tasks::{self, Operation, Outcome},
    },
    usual::UsualLock,
};

pub fn race(store: &Store, postgres: &PostgresStore, options: &Options, report: &mut Report) {
    const PREFIX: &str = "in-process";
    let title = "Acquire and release, 16 tasks, in process";
    if !options.wants(title) {
        return;
    }
    let runtime = &store.runtime;
    let plain: Vec<_> = (0..TASKS).map(Plain::new).collect();
    let mut contenders = vec![
        Contender::new(OURS, in_tasks(runtime, &store.leases(PREFIX))),
        Contender::new(USUAL, in_tasks(runtime, &store.usual())),
        Contender::new(
            "SET NX and DEL, 16 connections",
            load::turns(store.redis.addr, plain),
        ),
    ];
    for (name, leases) in postgres.both() {
        contenders.push(Contender::new(name, in_tasks(runtime, &leases)));
    }
    let advisory = in_tasks(runtime, &postgres.advisory());
    contenders.push(Contender::new(ADVISORY, advisory));
    let granted_before = postgres.granted();
    let outcomes = rounds::run(title, USUAL, contenders, options);
    store.assert_all_free();
    store.assert_granted(PREFIX, &outcomes);
    postgres.assert_all_free();
    postgres.assert_granted_since(granted_before, &outcomes);
    report.contenders(title, USUAL, &outcomes);
}

/// A lock, or a store of leases.
pub trait Lock: Clone + Send + Sync + 'static {
    fn acquire_and_release(&self, resource: &Resource) -> impl Future<Output = ()> + Send;
}

impl<L: Leases + Clone> Lock for L {
    async fn acquire_and_release(&self, resource: &Resource) {
        let lease = self.acquire(resource, Acquire::new(TTL)).await;
        let lease = lease.expect("it is free");
        let released = self.release(resource, &lease.id).await;
        released.expect("it was held");
    }
}

impl Lock for UsualLock {
    async fn acquire_and_release(&self, resource: &Resource) {
        let id = self.try_lock(resource.as_str(), TTL).await;
        self.unlock(resource.as_str(), id.expect("it is free"))
            .await;
    }
}

impl Lock for AdvisoryLock {
    async fn acquire_and_release(&self, resource: &Resource) {
        let held = self.lock(resource.as_str()).await;
        self.unlock(resource.as_str(), held).await;
    }
}

/// Returns a function that measures tasks that acquire and release a lock.
pub fn in_tasks<'a, L: Lock>(
    runtime: &'a Runtime,
    lock: &L,
) -> impl FnMut(Window) -> Sample + use<'a, L> {
    let tasks = (0..TASKS).map(|task| Task::new(lock.clone(), task));
    tasks::turns(runtime, tasks.collect())
}

/// Acquires and releases a lock for each resource of the task in turn.
struct Task<L> {
    lock: L,
    resources: Vec<Resource>,
    next: std::iter::Cycle<Range<usize>>,
}

impl<L> Task<L> {
    fn new(lock: L, task: usize) -> Self {
        let resources = names(task).into_iter().map(Resource::new);
        let resources: Vec<_> = resources.map(|name| name.expect("a name")).collect();
        Self {
            lock,
            next: (0..resources.len()).cycle(),
            resources,
        }
    }
}

impl<L: Lock> Operation for Task<L> {
    async fn run(&mut self) -> Outcome {
        let resource = &self.resources[self.next.next().expect("it never ends")];
        self.lock.acquire_and_release(resource).await;
        Outcome::Done
    }
}

/// A lock that shows the maximum throughput of Redis. It needs no script, no token, no comparison
/// of ids, and no client library.
struct Plain {
    names: Vec<String>,
    next: usize,
    holding: bool,
}

impl Plain {
    fn new(task: usize) -> Self {
        Self {
            names: names(task),
            next: 0,
            holding: false,
        }
    }
}

impl Client for Plain {
    fn request(&mut self, buffer: &mut Vec<u8>) {
        let key = format!("plain-{}", self.names[self.next]);
        let words: &[&str] = if self.holding {
            &["DEL", &key]
        } else {
            &["SET", &key, "x", "NX", "PX", "60000"]
        };
        buffer.extend(format!("*{}\r\n", words.len()).bytes());
        for word in words {
            buffer.extend(format!("${}\r\n{word}\r\n", word.len()).bytes());
        }
    }

    fn answered(&mut self, _status: u16, body: &[u8]) -> Answered {
        let expected: &[u8] = if self.holding { b":1\r\n" } else { b"+OK\r\n" };
        if body != expected {
            return Answered::Unexpected;
        }
        self.holding = !self.holding;
        if self.holding {
            return Answered::Partly;
        }
        self.next = (self.next + 1) % self.names.len();
        Answered::Done
    }

    /// Parses one-line responses.
    fn parse(bytes: &[u8]) -> Option<(u16, Range<usize>)> {
        bytes.ends_with(b"\r\n").then_some((200, 0..bytes.len()))
    }
}
