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
    let (usual, advisory) = (store.usual(), postgres.advisory());
    let theirs = (0..TASKS).map(|task| Theirs::new(&usual, task)).collect();
    let by_hand = (0..TASKS)
        .map(|task| ByHand::new(&advisory, task))
        .collect();
    let plain: Vec<_> = (0..TASKS).map(Plain::new).collect();
    let mut contenders = vec![
        Contender::new(OURS, ours(runtime, &store.leases(PREFIX))),
        Contender::new(USUAL, tasks::turns::<Theirs>(runtime, theirs)),
        Contender::new(
            "SET NX and DEL, 16 connections",
            load::turns(store.redis.addr, plain),
        ),
    ];
    for (name, leases) in postgres.both() {
        contenders.push(Contender::new(name, ours(runtime, &leases)));
    }
    let by_hand = tasks::turns::<ByHand>(runtime, by_hand);
    contenders.push(Contender::new(ADVISORY, by_hand));
    let granted_before = postgres.granted();
    let outcomes = rounds::run(title, USUAL, contenders, options);
    store.assert_all_free();
    store.assert_granted(PREFIX, &outcomes);
    postgres.assert_all_free();
    postgres.assert_granted_since(granted_before, &outcomes);
    report.contenders(title, USUAL, &outcomes);
}

/// Returns the tasks that lock resources in a store of this crate.
pub fn ours<'a, L: Leases + Clone>(
    runtime: &'a Runtime,
    leases: &L,
) -> impl FnMut(Window) -> Sample + use<'a, L> {
    let ours = (0..TASKS).map(|task| Ours::new(leases, task)).collect();
    tasks::turns::<Ours<L>>(runtime, ours)
}

struct Ours<L> {
    leases: L,
    resources: Vec<Resource>,
    next: std::iter::Cycle<Range<usize>>,
}

impl<L: Leases + Clone> Ours<L> {
    fn new(leases: &L, task: usize) -> Self {
        let resources = names(task).into_iter().map(Resource::new);
        let resources: Vec<_> = resources.map(|name| name.expect("a name")).collect();
        Self {
            leases: leases.clone(),
            next: (0..resources.len()).cycle(),
            resources,
        }
    }
}

impl<L: Leases> Operation for Ours<L> {
    async fn run(&mut self) -> Outcome {
        let resource = &self.resources[self.next.next().expect("it never ends")];
        let lease = self.leases.acquire(resource, Acquire::new(TTL)).await;
        let lease = lease.expect("it is free");
        let released = self.leases.release(resource, &lease.id);
        released.await.expect("it was held");
        Outcome::Done
    }
}

struct Theirs {
    lock: UsualLock,
    names: Vec<String>,
    next: std::iter::Cycle<Range<usize>>,
}

impl Theirs {
    fn new(lock: &UsualLock, task: usize) -> Self {
        let names = names(task);
        Self {
            lock: lock.clone(),
            next: (0..names.len()).cycle(),
            names,
        }
    }
}

impl Operation for Theirs {
    async fn run(&mut self) -> Outcome {
        let name = &self.names[self.next.next().expect("it never ends")];
        let id = self.lock.try_lock(name, TTL).await;
        self.lock.unlock(name, id.expect("it is free")).await;
        Outcome::Done
    }
}

struct ByHand {
    lock: AdvisoryLock,
    names: Vec<String>,
    next: std::iter::Cycle<Range<usize>>,
}

impl ByHand {
    fn new(lock: &AdvisoryLock, task: usize) -> Self {
        let names = names(task);
        Self {
            lock: lock.clone(),
            next: (0..names.len()).cycle(),
            names,
        }
    }
}

impl Operation for ByHand {
    async fn run(&mut self) -> Outcome {
        let name = &self.names[self.next.next().expect("it never ends")];
        let held = self.lock.lock(name).await;
        self.lock.unlock(name, held).await;
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
