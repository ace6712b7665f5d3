//! Concurrent tasks in thousands of orders of their steps: the checked properties hold, and each
//! broken variant of the code violates a property. `src/proof.md` lists the properties.

use tower_fence_interleavings::{
    holds, loses,
    scenarios::{announced, direct, flight, loss, memory, queue, reuse, slot, waiters},
};

/// Defines a test for each scenario, with the broken variants that its checks must find.
macro_rules! scenarios {
    ($($test:ident: $scenario:path, [$($mutant:literal),+ $(,)?];)+) => {$(
        #[test]
        fn $test() {
            holds($scenario);
            $(loses($mutant, $scenario);)+
        }
    )+};
}

scenarios! {
    every_waiter_for_a_connection_gets_one: reuse::every_waiter_gets_a_connection, [
        "reuse: the watch task ends, and reports it a moment later",
        "reuse: the watch task ends while a connection is kept",
    ];
    dropped_waiters_lose_no_connection: reuse::remaining_waiters_get_a_connection, [
        "reuse: a connection that was sent to a dropped waiter is lost",
    ];
    waiters_get_connections_despite_other_users_of_the_pool: reuse::other_users_have_connections, [
        "reuse: the acquiring task ends, and reports it a moment later",
    ];
    application_gets_connections_during_continuous_writes: reuse::application_gets_connections, [
        "reuse: tasks that have had no connection lately get no share",
    ];
    waiters_get_connections_after_failed_connects: reuse::some_connects_fail, [
        "reuse: the acquiring task ends after a failure, without reporting it",
    ];
    waiters_get_connections_after_another_runtime_ends: reuse::another_runtime_ends, [
        "reuse: the acquiring task ends with its runtime, and leaves the queue unchanged",
    ];
    a_grant_is_answered_after_its_announcement: announced::answered_grants_were_announced, [
        "announced: a grant is recorded before it is announced",
    ];
    grants_to_dropped_requests_are_released: announced::grants_to_dropped_requests_are_released, [
        "announced: a grant to a dropped request is kept",
    ];
    disconnecting_clients_close_no_pooled_connection:
        direct::disconnecting_clients_close_no_connection, [
        "direct: a dropped acquisition that had its turn is not completed",
        "direct: an acquisition is polled between its turn and its waker",
        "direct: free capacity is checked twice",
    ];
    writes_to_a_resource_pass_one_at_a_time: queue::one_at_a_time, [
        "queue: the first write to leave removes the queue",
        "queue: a permit that was sent to a dropped waiter is lost",
    ];
    every_waiter_in_memory_gets_the_lease: memory::every_waiter_in_memory_gets_the_lease, [
        "memory: the lease is granted without a notification",
        "memory: a dropped request keeps the lease",
    ];
    first_waiter_is_notified_of_a_new_lease_end: memory::first_waiter_is_notified_of_a_new_end, [
        "driver: the next waiter is not woken when the first one leaves",
    ];
    one_request_at_a_time_contacts_the_epoch_source: flight::one_request_re_reports_the_epoch, [
        "counters: every request that finds a report due sends it",
    ];
    waiting_requests_share_one_failed_attempt: flight::waiting_requests_share_one_failed_attempt, [
        "flight: the waiting request retries",
    ];
    all_watchers_report_the_same_loss: loss::all_watchers_report_the_same_loss, [
        "loss: the last loss counts",
        "loss: the loss is recorded, but no task is notified",
    ];
    every_waiter_in_redis_gets_the_lease: waiters::every_waiter_in_redis_gets_the_lease, [
        "driver: a waiter is notified but not woken",
        "driver: the connection is lost, and no waiter retries",
        "redis queue: the store reports that it listens before it does",
    ];
    every_waiter_in_postgres_gets_the_lease: waiters::every_waiter_in_postgres_gets_the_lease, [
        "driver: a waiter is notified but not woken",
        "driver: the connection is lost, and no waiter retries",
        "driver: a dropped request is not undone",
        "driver: a dropped request is undone before it has arrived",
    ];
    transaction_kept_by_a_handler_cannot_change_the_answer: slot::answer_stays_true, [
        "slot: the transaction is committed although the slot was closed",
        "slot: a transaction that returns late goes to the pool",
        "slot: a transaction that has begun to commit counts as escaped",
    ];
}
