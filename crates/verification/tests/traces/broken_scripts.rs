//! Redis scripts, each broken by a small change. The walks detect each change.

use super::{broken::Change, queue, quorum};

#[tokio::test]
async fn walks_of_a_quorum_detect_broken_scripts() {
    for (text, by) in [
        // A newer attempt yields to an older one.
        ("theirs > mine or", "theirs < mine or"),
        // A lease of another holder is taken.
        (
            "if lease and not (lease.id == ID and lease.holds) then",
            "if false then",
        ),
        // A proposal is sealed below the counter.
        ("(epoch == now.epoch and n <= now.n) then", "false then"),
        // The counter follows a lower count.
        ("(epoch == now.epoch and n > now.n)", "(epoch == now.epoch)"),
        // A clean-up removes a lease that was granted to another request.
        ("lease.ticket ~= ARGV[6] or", "false or"),
        // A release removes a lease with a newer token.
        (
            "is_one = tonumber(lease.token) <= tonumber(ARGV[8])",
            "is_one = true",
        ),
        // A break removes a lease with any token.
        (
            "if redis.call('GET', LEASE) ~= ARGV[6] then",
            "if not redis.call('GET', LEASE) then",
        ),
        // The reply to a read has no mark.
        ("token, lease.mark or ''", "token, '0'"),
    ] {
        let change = Change { text, by };
        change.is_found(quorum::lose_keys(Some(change))).await;
    }
}

#[tokio::test]
async fn walks_of_the_queue_detect_broken_scripts() {
    for (text, by) in [
        // The last request in the queue is served first.
        ("'ZPOPMIN', QUEUE)", "'ZPOPMAX', QUEUE)"),
        // The waiters of an issuer that did not confirm the last offer stay in the queue.
        ("if channel == lapsed then", "if false then"),
        // An issuer that did not confirm an offer is not notified.
        ("    redis.call(PUBLISH, lapsed, '* ' .. LEASE)\n", ""),
        // A released lease is treated as an unconfirmed offer.
        ("hand_over(now, true)", "hand_over(now)"),
        // A repeated request moves to the end of the queue.
        ("QUEUE, 'NX', ", "QUEUE, "),
    ] {
        let change = Change { text, by };
        change.is_found(queue::walks(Some(change))).await;
    }
}
