//! Redis scripts, each broken by a small change. The walks detect each change.

use super::{broken::Change, queue, quorum};

#[tokio::test]
async fn walks_of_a_quorum_detect_broken_scripts() {
    for change in [
        // A newer attempt yields to an older one.
        Change {
            text: "theirs > mine or",
            by: "theirs < mine or",
        },
        // A lease of another holder is taken.
        Change {
            text: "if lease and not (lease.id == ID and lease.holds) then",
            by: "if false then",
        },
        // A proposal is sealed below the counter.
        Change {
            text: "(epoch == now.epoch and n <= now.n) then",
            by: "false then",
        },
        // The counter follows a lower count.
        Change {
            text: "(epoch == now.epoch and n > now.n)",
            by: "(epoch == now.epoch)",
        },
        // A clean-up removes a lease that was granted to another request.
        Change {
            text: "lease.ticket ~= ARGV[6] or",
            by: "false or",
        },
        // A release removes a lease with a newer token.
        Change {
            text: "is_one = tonumber(lease.token) <= tonumber(ARGV[8])",
            by: "is_one = true",
        },
        // A break removes a lease with any token.
        Change {
            text: "if redis.call('GET', LEASE) ~= ARGV[6] then",
            by: "if not redis.call('GET', LEASE) then",
        },
    ] {
        change
            .is_found(quorum::lose_keys(Some(change)), "by seed")
            .await;
    }
}

#[tokio::test]
async fn walks_of_the_queue_detect_broken_scripts() {
    for change in [
        // The last request in the queue is served first.
        Change {
            text: "'ZPOPMIN', QUEUE)",
            by: "'ZPOPMAX', QUEUE)",
        },
        // The waiters of an issuer that did not confirm the last offer stay in the queue.
        Change {
            text: "if channel == lapsed then",
            by: "if false then",
        },
        // An issuer that did not confirm an offer is not notified.
        Change {
            text: "    redis.call(PUBLISH, lapsed, '* ' .. LEASE)\n",
            by: "",
        },
        // A released lease is treated as an unconfirmed offer.
        Change {
            text: "hand_over(now, true)",
            by: "hand_over(now)",
        },
        // A repeated request moves to the end of the queue.
        Change {
            text: "QUEUE, 'NX', ",
            by: "QUEUE, ",
        },
    ] {
        change.is_found(queue::walks(Some(change)), "").await;
    }
}
