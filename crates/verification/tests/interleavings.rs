//! Concurrent tasks in thousands of orders of their steps: the checked properties hold, and each
//! broken variant of the code violates a property. `src/proof.md` lists the properties.

use tower_fence_interleavings::{
    holds, loses,
    scenarios::{announced, direct, flight, loss, memory, queue, reuse, slot, waiters},
};

#[test]
fn every_waiter_for_a_connection_gets_one() {
    holds(reuse::every_waiter_gets_a_connection);
    for mutant in [
        "reuse: the watch task ends, and reports it a moment later",
        "reuse: the watch task ends while a connection is kept",
    ] {
        loses(mutant, reuse::every_waiter_gets_a_connection);
    }
}

#[test]
fn dropped_waiters_lose_no_connection() {
    holds(reuse::remaining_waiters_get_a_connection);
    loses(
        "reuse: a connection that was sent to a dropped waiter is lost",
        reuse::remaining_waiters_get_a_connection,
    );
}

#[test]
fn waiters_get_connections_despite_other_users_of_the_pool() {
    holds(reuse::other_users_have_connections);
    loses(
        "reuse: the acquiring task ends, and reports it a moment later",
        reuse::other_users_have_connections,
    );
}

#[test]
fn application_gets_connections_during_continuous_writes() {
    holds(reuse::application_gets_connections);
    loses(
        "reuse: tasks that have had no connection lately get no share",
        reuse::application_gets_connections,
    );
}

#[test]
fn waiters_get_connections_after_failed_connects() {
    holds(reuse::some_connects_fail);
    loses(
        "reuse: the acquiring task ends after a failure, without reporting it",
        reuse::some_connects_fail,
    );
}

#[test]
fn waiters_get_connections_after_another_runtime_ends() {
    holds(reuse::another_runtime_ends);
    loses(
        "reuse: the acquiring task ends with its runtime, and leaves the queue unchanged",
        reuse::another_runtime_ends,
    );
}

#[test]
fn a_grant_is_answered_after_its_announcement() {
    holds(announced::answered_grants_were_announced);
    loses(
        "announced: a grant is recorded before it is announced",
        announced::answered_grants_were_announced,
    );
    holds(announced::grants_to_dropped_requests_are_released);
    loses(
        "announced: a grant to a dropped request is kept",
        announced::grants_to_dropped_requests_are_released,
    );
}

#[test]
fn disconnecting_clients_close_no_pooled_connection() {
    holds(direct::disconnecting_clients_close_no_connection);
    for mutant in [
        "direct: a dropped acquisition that had its turn is not completed",
        "direct: an acquisition is polled between its turn and its waker",
        "direct: free capacity is checked twice",
    ] {
        loses(mutant, direct::disconnecting_clients_close_no_connection);
    }
}

#[test]
fn writes_to_a_resource_pass_one_at_a_time() {
    holds(queue::one_at_a_time);
    for mutant in [
        "queue: the first write to leave removes the queue",
        "queue: a permit that was sent to a dropped waiter is lost",
    ] {
        loses(mutant, queue::one_at_a_time);
    }
}

#[test]
fn every_waiter_in_memory_gets_the_lease() {
    holds(memory::every_waiter_gets_the_lease);
    for mutant in [
        "memory: the lease is granted without a notification",
        "memory: a dropped request keeps the lease",
    ] {
        loses(mutant, memory::every_waiter_gets_the_lease);
    }
}

#[test]
fn first_waiter_is_notified_of_a_new_lease_end() {
    holds(memory::first_waiter_is_notified_of_a_new_end);
    loses(
        "driver: the next waiter is not woken when the first one leaves",
        memory::first_waiter_is_notified_of_a_new_end,
    );
}

#[test]
fn one_request_at_a_time_contacts_the_epoch_source() {
    holds(flight::one_request_re_reports_the_epoch);
    loses(
        "counters: every request that finds a report due sends it",
        flight::one_request_re_reports_the_epoch,
    );
}

#[test]
fn waiting_requests_share_one_failed_attempt() {
    holds(flight::waiting_requests_share_one_failed_attempt);
    loses(
        "flight: the waiting request retries",
        flight::waiting_requests_share_one_failed_attempt,
    );
}

#[test]
fn all_watchers_report_the_same_loss() {
    holds(loss::all_watchers_report_the_same_loss);
    for mutant in [
        "loss: the last loss counts",
        "loss: the loss is recorded, but no task is notified",
    ] {
        loses(mutant, loss::all_watchers_report_the_same_loss);
    }
}

#[test]
fn every_waiter_in_redis_gets_the_lease() {
    holds(waiters::every_waiter_in_redis_gets_the_lease);
    for mutant in [
        "driver: a waiter is notified but not woken",
        "driver: the connection is lost, and no waiter retries",
        "redis queue: the store reports that it listens before it does",
    ] {
        loses(mutant, waiters::every_waiter_in_redis_gets_the_lease);
    }
}

#[test]
fn every_waiter_in_postgres_gets_the_lease() {
    holds(waiters::every_waiter_in_postgres_gets_the_lease);
    for mutant in [
        "driver: a waiter is notified but not woken",
        "driver: the connection is lost, and no waiter retries",
        "driver: a dropped request is not undone",
        "driver: a dropped request is undone before it has arrived",
    ] {
        loses(mutant, waiters::every_waiter_in_postgres_gets_the_lease);
    }
}

#[test]
fn transaction_kept_by_a_handler_cannot_change_the_answer() {
    holds(slot::answer_stays_true);
    for mutant in [
        "slot: the transaction is committed although the slot was closed",
        "slot: a transaction that returns late goes to the pool",
        "slot: a transaction that has begun to commit counts as escaped",
    ] {
        loses(mutant, slot::answer_stays_true);
    }
}
