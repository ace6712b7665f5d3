//! The broken variants: what a file has once, and what it would have instead.

use std::cell::Cell;

pub struct Mutant {
    pub name: &'static str,
    pub file: &'static str,
    /// An expression or statements.
    pub code: &'static str,
    /// What comes in its place; with `IS_ON` in it, what comes in its place whether the mutant is on or not.
    pub broken: &'static str,
}

thread_local! {
    static ON: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Has this thread run with a broken variant, or with none.
pub fn turn_on(name: Option<&'static str>) {
    assert!(name.is_none_or(|name| MUTANTS.iter().any(|mutant| mutant.name == name)));
    ON.set(name);
}

pub fn is_on(name: &str) -> bool {
    ON.get() == Some(name)
}

pub const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "reuse: what was sent to one that has given up is forgotten",
        file: "fence/conn/reuse/mod.rs",
        code: "checked_out = unsent",
        broken: "std::mem::forget(unsent); return",
    },
    Mutant {
        name: "reuse: the watch ends, and says so a moment later",
        file: "fence/conn/reuse/mod.rs",
        code: "!state.watched",
        broken: "let done = !state.watched;
            if done {
                state.watched = true;
                drop(state);
                state = shared.lock();
                state.watched = false;
            }
            done",
    },
    Mutant {
        name: "reuse: the watch ends while something is on the shelf",
        file: "fence/conn/reuse/mod.rs",
        code: "!state.shelf.is_empty();",
        broken: "!state.shelf.is_empty() && !IS_ON;",
    },
    Mutant {
        name: "reuse: others get no share where they have had none lately",
        file: "fence/conn/reuse/mod.rs",
        code: "state.shared.elapsed() >= FAIRNESS_INTERVAL",
        broken: "(state.shared.elapsed() >= FAIRNESS_INTERVAL) != IS_ON",
    },
    Mutant {
        name: "reuse: who asks ends, and says so a moment later",
        file: "fence/conn/reuse/line.rs",
        code: "state.acquirers -= 1;
                drop(state);
                self.0 = None;",
        broken: "drop(state); shared.lock().acquirers -= 1; self.0 = None;",
    },
    Mutant {
        name: "reuse: who asks in vain ends, and tells nobody",
        file: "fence/conn/reuse/line.rs",
        code: "let first = shared.lock().line.pop_front();",
        broken: "if IS_ON {
                shared.lock().acquirers -= 1;
                std::mem::forget(self);
                return;
            }
            let first = shared.lock().line.pop_front();",
    },
    Mutant {
        name: "reuse: who asks ends with its runtime, and leaves the line as it is",
        file: "fence/conn/reuse/line.rs",
        code: "mem::take(&mut state.line)",
        broken: "std::collections::VecDeque::new()",
    },
    Mutant {
        name: "announced: noted before it is announced",
        file: "lease/announced.rs",
        code: "for _ in 0..ATTEMPTS {",
        broken: "if IS_ON { self.tokens().note(digest.clone(), lease.token, lease.ttl); }
        for _ in 0..ATTEMPTS {",
    },
    Mutant {
        name: "announced: what was granted to one that has gone is kept",
        file: "lease/announced.rs",
        code: "if chosen_id {",
        broken: "if chosen_id || IS_ON {",
    },
    Mutant {
        name: "direct: a dropped acquisition that had its turn is not seen through",
        file: "fence/conn/direct.rs",
        code: "self.in_line &= !has_come",
        broken: "",
    },
    Mutant {
        name: "direct: polled in its turn before the waker has come",
        file: "fence/conn/direct.rs",
        code: "self.in_line && self.asked && !has_come",
        broken: "false",
    },
    Mutant {
        name: "direct: looked for room twice",
        file: "fence/conn/direct.rs",
        code: "direct.free() == 0 && direct.pool.num_idle() == 0",
        broken: "direct.opening().is_none() && direct.pool.num_idle() == 0",
    },
    Mutant {
        name: "queue: the first to leave takes it with it",
        file: "fence/local/queue.rs",
        code: "Arc::strong_count(queue) == 1",
        broken: "true",
    },
    Mutant {
        name: "high mark: judged by a look from before",
        file: "fence/local/high_mark.rs",
        code: "look.began > arrived && look.outcome.is_some()",
        broken: "look.outcome.is_some()",
    },
    Mutant {
        name: "memory: handed over, and not woken",
        file: "lease/memory/partition.rs",
        code: "self.calls.push(first.ticket);
        true",
        broken: "true",
    },
    Mutant {
        name: "memory: granted to one that has left, and kept",
        file: "lease/memory/partition.rs",
        code: "grant.lease == *lease && grant.ticket == Some(*ticket)",
        broken: "false",
    },
    Mutant {
        name: "driver: the next one is not woken when the first one leaves",
        file: "lease/driver/queue.rs",
        code: "line.wake_first();
            if line.waiters.is_empty()",
        broken: "if !IS_ON { line.wake_first(); }
            if line.waiters.is_empty()",
    },
    Mutant {
        name: "flight: whoever waited tries again",
        file: "lease/single_flight.rs",
        code: "*failed_at > asked_at",
        broken: "false",
    },
    Mutant {
        name: "memory: whoever finds that a reminder is due sends it",
        file: "lease/counters.rs",
        code: "*at = Instant::now();
                Reminder",
        broken: "if !IS_ON { *at = Instant::now(); }
                Reminder",
    },
    Mutant {
        name: "loss: the last one counts",
        file: "client/held_lease.rs",
        code: "state.lost.get_or_insert_with(|| {
                loss.count();
                loss
            });",
        broken: "loss.count(); state.lost = Some(loss);",
    },
    Mutant {
        name: "loss: noted, and nobody told",
        file: "client/held_lease.rs",
        code: "let first = state.lost.is_none();",
        broken: "let first = state.lost.is_none() && !IS_ON;",
    },
    Mutant {
        name: "redis line: it listens, and is not subscribed yet",
        file: "lease/redis/listener.rs",
        code: "partitions.contains(&partition)",
        broken: "true",
    },
    Mutant {
        name: "driver: called, and not woken",
        file: "lease/driver/queue.rs",
        code: "self.notify.notify_one();",
        broken: "if !IS_ON { self.notify.notify_one(); }",
    },
    Mutant {
        name: "driver: the connection is lost, and no request retries",
        file: "lease/driver/listener.rs",
        code: "turns.queue.call_all();
            sleep(SHORT_PAUSE).await;",
        broken: "if !IS_ON { turns.queue.call_all(); }
            sleep(SHORT_PAUSE).await;",
    },
    Mutant {
        name: "driver: what was asked by one that has left is not undone",
        file: "lease/driver/pending.rs",
        code: "let _ = store.end(&resource, &End::Abandon { lease, ticket }).await;",
        broken: "if !IS_ON { let _ = store.end(&resource, &End::Abandon { lease, ticket }).await; }",
    },
    Mutant {
        name: "driver: it is undone before it was asked",
        file: "lease/driver/pending.rs",
        code: "let _ = call.await;",
        broken: "if !IS_ON { let _ = call.await; }",
    },
    Mutant {
        name: "slot: committed although it was closed",
        file: "fence/tx/slot.rs",
        code: "|place| matches!(place, Place::Lent), Place::Committing",
        broken: "|place| IS_ON || matches!(place, Place::Lent), Place::Committing",
    },
    Mutant {
        name: "slot: what comes back late goes to the pool",
        file: "fence/tx/slot.rs",
        code: "transaction.discard();",
        broken: "drop(transaction);",
    },
    Mutant {
        name: "slot: what is out is no escape where it has begun to commit",
        file: "fence/tx/slot.rs",
        code: "place: mem::replace(&mut state.place, Place::Closed),",
        broken: "place: match mem::replace(&mut state.place, Place::Closed) {
                Place::Committing if IS_ON => Place::Lent,
                place => place,
            },",
    },
];
