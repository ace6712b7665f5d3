//! The broken variants. Each has a snippet that its file contains exactly once, and a replacement.

use std::cell::Cell;

pub struct Mutant {
    pub name: &'static str,
    pub file: &'static str,
    /// An expression, or statements.
    pub code: &'static str,
    /// The replacement while the mutant is on. A replacement that contains `IS_ON` is always in
    /// place, and `IS_ON` is true while the mutant is on.
    pub broken: &'static str,
}

thread_local! {
    static ON: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Turns on one broken variant in this thread, or turns all of them off.
pub fn turn_on(name: Option<&'static str>) {
    assert!(name.is_none_or(|name| MUTANTS.iter().any(|mutant| mutant.name == name)));
    ON.set(name);
}

pub fn is_on(name: &str) -> bool {
    ON.get() == Some(name)
}

pub const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "reuse: a connection that was sent to a dropped waiter is lost",
        file: "fence/conn/reuse/mod.rs",
        code: "checked_out = unsent",
        broken: "std::mem::forget(unsent); return",
    },
    Mutant {
        name: "reuse: the watch task ends, and reports it a moment later",
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
        name: "reuse: the watch task ends while a connection is kept",
        file: "fence/conn/reuse/mod.rs",
        code: "!state.kept.is_empty();",
        broken: "!state.kept.is_empty() && !IS_ON;",
    },
    Mutant {
        name: "reuse: tasks that have had no connection lately get no share",
        file: "fence/conn/reuse/mod.rs",
        code: "state.shared.elapsed() >= FAIRNESS_INTERVAL",
        broken: "(state.shared.elapsed() >= FAIRNESS_INTERVAL) != IS_ON",
    },
    Mutant {
        name: "reuse: the acquiring task ends, and reports it a moment later",
        file: "fence/conn/reuse/acquirer.rs",
        code: "state.acquirers -= 1;
                drop(state);
                self.0 = None;",
        broken: "drop(state); shared.lock().acquirers -= 1; self.0 = None;",
    },
    Mutant {
        name: "reuse: the acquiring task ends after a failure, without reporting it",
        file: "fence/conn/reuse/acquirer.rs",
        code: "let first = shared.lock().queue.pop_front();",
        broken: "if IS_ON {
                shared.lock().acquirers -= 1;
                std::mem::forget(self);
                return;
            }
            let first = shared.lock().queue.pop_front();",
    },
    Mutant {
        name: "reuse: the acquiring task ends with its runtime, and leaves the queue unchanged",
        file: "fence/conn/reuse/acquirer.rs",
        code: "mem::take(&mut state.queue)",
        broken: "std::collections::VecDeque::new()",
    },
    Mutant {
        name: "announced: a grant is recorded before it is announced",
        file: "lease/announced.rs",
        code: "for _ in 0..ATTEMPTS {",
        broken: "if IS_ON { self.note_announced(&lease); }
        for _ in 0..ATTEMPTS {",
    },
    Mutant {
        name: "announced: a grant to a dropped request is kept",
        file: "lease/announced.rs",
        code: "if chosen_id {",
        broken: "if chosen_id || IS_ON {",
    },
    Mutant {
        name: "direct: a dropped acquisition that had its turn is not completed",
        file: "fence/conn/direct.rs",
        code: "self.queued &= !is_woken",
        broken: "",
    },
    Mutant {
        name: "direct: an acquisition is polled between its turn and its waker",
        file: "fence/conn/direct.rs",
        code: "self.queued && self.polled_before && !is_woken",
        broken: "false",
    },
    Mutant {
        name: "direct: free capacity is checked twice",
        file: "fence/conn/direct.rs",
        code: "direct.free() == 0 && direct.pool.num_idle() == 0",
        broken: "direct.count_opening().is_none() && direct.pool.num_idle() == 0",
    },
    Mutant {
        name: "queue: the first write to leave removes the queue",
        file: "fence/local/queue.rs",
        code: "queue.get_mut().take_first()",
        broken: "None",
    },
    Mutant {
        name: "queue: a permit that was sent to a dropped waiter is lost",
        file: "fence/local/queue.rs",
        code: "self.key = unsent.key.take();",
        broken: "unsent.key = None;",
    },
    Mutant {
        name: "memory: the lease is granted without a notification",
        file: "lease/memory/partition.rs",
        code: "self.calls.push(first.ticket);
        true",
        broken: "true",
    },
    Mutant {
        name: "memory: a dropped request keeps the lease",
        file: "lease/memory/partition.rs",
        code: "grant.lease == *lease && grant.ticket == Some(*ticket) && grant.holds()",
        broken: "false",
    },
    Mutant {
        name: "driver: the next waiter is not woken when the first one leaves",
        file: "lease/driver/queue.rs",
        code: "queue.wake_first();
            if queue.waiters.is_empty()",
        broken: "if !IS_ON { queue.wake_first(); }
            if queue.waiters.is_empty()",
    },
    Mutant {
        name: "flight: the waiting request retries",
        file: "lease/single_flight.rs",
        code: "*failed_at > asked_at",
        broken: "false",
    },
    Mutant {
        name: "counters: every request that finds a report due sends it",
        file: "lease/counters.rs",
        code: "self.reported_at = Some(Instant::now());",
        broken: "if !IS_ON { self.reported_at = Some(Instant::now()); }",
    },
    Mutant {
        name: "loss: the last loss counts",
        file: "client/held_lease.rs",
        code: "state.lost.get_or_insert_with(|| loss.clone());",
        broken: "state.lost = Some(loss.clone());",
    },
    Mutant {
        name: "loss: the loss is recorded, but no task is notified",
        file: "client/held_lease.rs",
        code: "is_first
        });",
        broken: "is_first && !IS_ON
        });",
    },
    Mutant {
        name: "redis queue: the store reports that it listens before it does",
        file: "lease/redis/listener.rs",
        code: "lock(&subscriptions.partitions).contains(&partition)",
        broken: "true",
    },
    Mutant {
        name: "driver: a waiter is notified but not woken",
        file: "lease/driver/queue.rs",
        code: "self.notify.notify_one();",
        broken: "if !IS_ON { self.notify.notify_one(); }",
    },
    Mutant {
        name: "driver: the connection is lost, and no waiter retries",
        file: "lease/driver/listener.rs",
        code: "turns.call_all();
            sleep(SHORT_PAUSE).await;",
        broken: "if !IS_ON { turns.call_all(); }
            sleep(SHORT_PAUSE).await;",
    },
    Mutant {
        name: "driver: a dropped request is not undone",
        file: "lease/driver/pending.rs",
        code: "let _ = store.end(&resource, &End::Abandon { lease, ticket }).await;",
        broken: "if !IS_ON { let _ = store.end(&resource, &End::Abandon { lease, ticket }).await; }",
    },
    Mutant {
        name: "driver: a dropped request is undone before it has arrived",
        file: "lease/driver/pending.rs",
        code: "self.answered().await;",
        broken: "if !IS_ON { self.answered().await; }",
    },
    Mutant {
        name: "slot: the transaction is committed although the slot was closed",
        file: "fence/tx/slot.rs",
        code: "|place| matches!(place, Place::Lent), Place::Committing",
        broken: "|place| IS_ON || matches!(place, Place::Lent), Place::Committing",
    },
    Mutant {
        name: "slot: a transaction that returns late goes to the pool",
        file: "fence/tx/slot.rs",
        code: "transaction.discard();",
        broken: "drop(transaction);",
    },
    Mutant {
        name: "slot: a transaction that has begun to commit counts as escaped",
        file: "fence/tx/slot.rs",
        code: "place: mem::replace(&mut state.place, Place::Closed),",
        broken: "place: match mem::replace(&mut state.place, Place::Closed) {
                Place::Committing if IS_ON => Place::Lent,
                place => place,
            },",
    },
];
