//! Concurrent tasks in thousands of orders of their steps: the checked properties hold, and each
//! broken variant of the code violates a property. `src/proof.md` lists the properties.

use tower_fence_interleavings::{
    holds, loses,
    scenarios::{announced, direct, flight, high_mark, line, loss, memory, queue, reuse, slot},
};

#[test]
fn everyone_who_waits_for_a_connection_gets_one() {
    holds(reuse::everyone_gets_a_connection);
    for mutant in [
        "reuse: the watch task ends, and reports it a moment later",
        "reuse: the watch task ends while a connection is kept",
    ] {
        loses(mutant, reuse::everyone_gets_a_connection);
    }
}

#[test]
fn waiters_that_go_away_take_no_connection_with_them() {
    holds(reuse::whoever_stays_gets_a_connection);
    loses(
        "reuse: a connection that was sent to a waiter that has left is lost",
        reuse::whoever_stays_gets_a_connection,
    );
}

#[test]
fn nobody_is_forgotten_while_others_of_the_application_have_the_connections() {
    holds(reuse::others_have_connections_too);
    loses(
        "reuse: the acquiring task ends, and reports it a moment later",
        reuse::others_have_connections_too,
    );
}

#[test]
fn others_of_the_application_get_their_share() {
    holds(reuse::others_get_their_share);
    loses(
        "reuse: tasks that have had no connection lately get no share",
        reuse::others_get_their_share,
    );
}

#[test]
fn whoever_is_told_that_the_database_is_away_may_try_again() {
    holds(reuse::the_database_is_away_at_times);
    loses(
        "reuse: the acquiring task ends after a failure, without reporting it",
        reuse::the_database_is_away_at_times,
    );
}

#[test]
fn the_end_of_another_runtime_keeps_nobody_waiting() {
    holds(reuse::another_runtime_ends);
    loses(
        "reuse: the acquiring task ends with its runtime, and leaves the queue unchanged",
        reuse::another_runtime_ends,
    );
}

#[test]
fn a_grant_is_answered_after_its_announcement() {
    holds(announced::what_is_answered_was_announced);
    loses(
        "announced: a grant is recorded before it is announced",
        announced::what_is_answered_was_announced,
    );
    holds(announced::what_nobody_hears_of_is_given_back);
    loses(
        "announced: a grant to a caller that has left is kept",
        announced::what_nobody_hears_of_is_given_back,
    );
}

#[test]
fn clients_that_come_and_go_do_not_empty_the_pool() {
    holds(direct::who_goes_away_closes_nothing);
    for mutant in [
        "direct: a dropped acquisition that had its turn is not completed",
        "direct: an acquisition is polled between its turn and its waker",
        "direct: free capacity is checked twice",
    ] {
        loses(mutant, direct::who_goes_away_closes_nothing);
    }
}

#[test]
fn writes_to_a_resource_pass_one_at_a_time() {
    holds(queue::one_at_a_time);
    loses(
        "queue: the first write to leave removes the queue",
        queue::one_at_a_time,
    );
}

#[test]
fn nobody_is_refused_for_a_number_that_was_handed_out() {
    holds(high_mark::nobody_is_refused_for_what_was_handed_out);
    loses(
        "high mark: a request is judged by an earlier read",
        high_mark::nobody_is_refused_for_what_was_handed_out,
    );
}

#[test]
fn everyone_in_line_gets_the_lease() {
    holds(memory::everyone_in_line_gets_the_lease);
    for mutant in [
        "memory: the lease is granted without a notification",
        "memory: a request that has left keeps the lease",
    ] {
        loses(mutant, memory::everyone_in_line_gets_the_lease);
    }
}

#[test]
fn whoever_is_first_in_line_knows_when_the_lease_ends() {
    holds(memory::whoever_is_first_knows_when_the_lease_ends);
    loses(
        "driver: the next waiter is not woken when the first one leaves",
        memory::whoever_is_first_knows_when_the_lease_ends,
    );
}

#[test]
fn one_request_at_a_time_asks_the_source_of_epochs() {
    holds(flight::one_of_them_reminds_the_source);
    loses(
        "counters: every request that finds a report due sends it",
        flight::one_of_them_reminds_the_source,
    );
}

#[test]
fn nobody_waits_for_one_failure_after_the_other() {
    holds(flight::nobody_waits_for_one_failure_after_the_other);
    loses(
        "flight: the waiting request retries",
        flight::nobody_waits_for_one_failure_after_the_other,
    );
}

#[test]
fn everyone_is_told_of_one_loss() {
    holds(loss::everyone_is_told_of_one_loss);
    for mutant in [
        "loss: the last loss counts",
        "loss: the loss is recorded, but no task is notified",
    ] {
        loses(mutant, loss::everyone_is_told_of_one_loss);
    }
}

#[test]
fn everyone_in_line_in_redis_gets_the_lease() {
    holds(line::everyone_in_redis_gets_the_lease);
    for mutant in [
        "driver: a waiter is notified but not woken",
        "driver: the connection is lost, and no waiter retries",
        "redis queue: the store reports that it listens before it does",
    ] {
        loses(mutant, line::everyone_in_redis_gets_the_lease);
    }
}

#[test]
fn everyone_in_line_in_postgres_gets_the_lease() {
    holds(line::everyone_in_postgres_gets_the_lease);
    for mutant in [
        "driver: a waiter is notified but not woken",
        "driver: the connection is lost, and no waiter retries",
        "driver: the request of a caller that has left is not undone",
        "driver: the request of a caller that has left is undone before it has arrived",
    ] {
        loses(mutant, line::everyone_in_postgres_gets_the_lease);
    }
}

#[test]
fn what_a_handler_keeps_changes_nothing_that_was_answered() {
    holds(slot::what_is_answered_stays_true);
    for mutant in [
        "slot: the transaction is committed although the slot was closed",
        "slot: a transaction that returns late goes to the pool",
        "slot: a transaction that has begun to commit counts as escaped",
    ] {
        loses(mutant, slot::what_is_answered_stays_true);
    }
}
