//! What the nodes of a quorum lose, and why no token is granted twice then. As in `quorum_scripts`, each schedule is
//! played with the scripts as they are, and without a rule.

use crate::support::quorum::{Quorum, Rule, Servers, Violation, holds, is_caught};

const TWICE: Violation = Violation::SameTokenTwice;
const LOWER: Violation = Violation::LowerToken;

/// 1. `a` is granted a token on nodes 1 and 2. 2. Node 2 is started from a snapshot of before. 3. `b` asks nodes 2 and
///    3, neither of which knows of `a`.
async fn an_old_snapshot(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let snapshot = quorum.snapshot(2);
    let a = quorum.request("a");
    quorum.grant(a, &[1, 2]).await;
    quorum.restart_from(2, snapshot).await;
    let b = quorum.request("b");
    quorum.grant(b, &[2, 3]).await;
}

#[tokio::test]
async fn a_clock_counts_under_the_history_in_which_it_was_written() {
    let servers = &mut Servers::with_files().await;
    holds(servers, an_old_snapshot, "first 1.1, a 1.2, b 2.1").await;
    let twice = ("first 1.1, a 1.2, b 1.2", TWICE);
    is_caught(servers, Rule::HistoryWhenTaking, an_old_snapshot, twice).await;
}

/// The same, but before `b` somebody else takes the key on node 2, and gives up.
async fn a_clock_that_was_met(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let snapshot = quorum.snapshot(2);
    let a = quorum.request("a");
    quorum.grant(a, &[1, 2]).await;
    quorum.restart_from(2, snapshot).await;
    let mut other = quorum.request("other");
    quorum.take(&mut other, &[2]).await;
    quorum.clean_up(&other, &[2]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[2, 3]).await;
}

#[tokio::test]
async fn a_clock_of_another_history_is_blank_from_the_first_time_on() {
    let (servers, schedule) = (&mut Servers::with_files().await, a_clock_that_was_met);
    holds(servers, schedule, "first 1.1, a 1.2, b 2.1").await;
    let twice = ("first 1.1, a 1.2, b 1.2", TWICE);
    is_caught(servers, Rule::BlankUnderNewHistory, schedule, twice).await;
}

/// 1. `a` takes nodes 2 and 3, chooses, and is slow. 2. Its key on node 2 expires. 3. `b` is granted that token on
///    nodes 1 and 2. 4. Node 2 is started from a snapshot that has the key of `a`. 5. The seals of `a` arrive.
async fn a_snapshot_with_the_key(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut a = quorum.request("a");
    quorum.take(&mut a, &[2, 3]).await;
    quorum.choose(&mut a);
    let snapshot = quorum.snapshot(2);
    quorum.expire(&[2]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[1, 2]).await;
    quorum.restart_from(2, snapshot).await;
    quorum.seal(&mut a, &[2, 3]).await;
}

#[tokio::test]
async fn a_seal_fits_to_the_history_in_which_the_key_was_taken() {
    let (servers, schedule) = (&mut Servers::with_files().await, a_snapshot_with_the_key);
    holds(servers, schedule, "first 1.1, b 1.2").await;
    let twice = ("first 1.1, b 1.2, a 1.2", TWICE);
    is_caught(servers, Rule::HistoryWhenSealing, schedule, twice).await;
}

/// 1. `a` is granted the first token on nodes 1 and 2. 2. Node 2 comes back empty. 3. `b` asks nodes 2 and 3, neither
///    of which has a clock.
async fn no_clock_is_left(quorum: &mut Quorum<'_>) {
    let a = quorum.request("a");
    quorum.grant(a, &[1, 2]).await;
    quorum.restart_empty(2).await;
    let b = quorum.request("b");
    quorum.grant(b, &[2, 3]).await;
}

#[tokio::test]
async fn a_lost_clock_has_not_counted_nothing() {
    let servers = &mut Servers::own(3).await;
    holds(servers, no_clock_is_left, "a 1.1, b 2.1").await;
    let twice = ("a 1.1, b 1.1", TWICE);
    is_caught(servers, Rule::LostIsNotZero, no_clock_is_left, twice).await;
}

/// The same, but node 3 has a clock that is older than the grant.
async fn an_older_clock_is_left(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let a = quorum.request("a");
    quorum.grant(a, &[1, 2]).await;
    quorum.restart_empty(2).await;
    let b = quorum.request("b");
    quorum.grant(b, &[2, 3]).await;
}

#[tokio::test]
async fn a_lost_clock_is_not_passed_over_since_another_is_usable() {
    let (servers, schedule) = (&mut Servers::own(3).await, an_older_clock_is_left);
    holds(servers, schedule, "first 1.1, a 1.2, b 2.1").await;
    let twice = ("first 1.1, a 1.2, b 1.2", TWICE);
    for rule in [Rule::LostIsNotPassedOver, Rule::LostIsNotZero] {
        is_caught(servers, rule, schedule, twice).await;
    }
}

/// 1. Node 1 comes back empty. 2. `a` is granted a token of the next epoch on nodes 1 and 2. 3. Node 2 comes back
///    empty. 4. `b` asks nodes 2 and 3, which know the epoch of before.
async fn two_restarts(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    quorum.restart_empty(1).await;
    let a = quorum.request("a");
    quorum.grant(a, &[1, 2]).await;
    quorum.restart_empty(2).await;
    let b = quorum.request("b");
    quorum.grant(b, &[2, 3]).await;
}

#[tokio::test]
async fn an_epoch_comes_from_the_database() {
    let servers = &mut Servers::own(3).await;
    holds(servers, two_restarts, "first 1.1, a 2.1, b 3.1").await;
    let twice = ("first 1.1, a 2.1, b 2.1", TWICE);
    is_caught(servers, Rule::EpochFromDatabase, two_restarts, twice).await;
}

/// The same, but the issuer of `b` has had its epoch since before.
async fn an_epoch_in_stock(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut b = quorum.request("b");
    quorum.ask_ahead(&mut b);
    quorum.restart_empty(1).await;
    let a = quorum.request("a");
    quorum.grant(a, &[1, 2]).await;
    quorum.restart_empty(2).await;
    quorum.grant(b, &[2, 3]).await;
}

#[tokio::test]
async fn an_epoch_is_asked_for_when_it_is_needed() {
    let servers = &mut Servers::own(3).await;
    holds(servers, an_epoch_in_stock, "first 1.1, a 2.1, b 3.1").await;
    let lower = ("first 1.1, a 3.1, b 2.1", LOWER);
    is_caught(servers, Rule::EpochAskedNow, an_epoch_in_stock, lower).await;
}

/// 1. `a` takes nodes 1 and 2, which have no clock yet, gets an epoch, and is slow. 2. Its key on node 2 expires. 3.
///    `b` is granted a token of the next epoch on nodes 2 and 3. 4. Node 2 loses all, but not its history. 5. What `a`
///    has sent to take node 2 arrives once more, and is the first there again. 6. The seals of `a` arrive. 7. `c` asks
///    nodes 1 and 2.
async fn a_clock_is_lost(quorum: &mut Quorum<'_>, flushes: bool) {
    let mut a = quorum.request("a");
    quorum.take(&mut a, &[1, 2]).await;
    quorum.choose(&mut a);
    quorum.expire(&[2]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[2, 3]).await;
    if flushes {
        quorum.flush(2).await;
    } else {
        quorum.expire(&[2]).await;
        quorum.evict_clock(2).await;
    }
    quorum.take(&mut a, &[2]).await;
    quorum.seal(&mut a, &[1, 2]).await;
    quorum.expire(&[1, 2]).await;
    let c = quorum.request("c");
    quorum.grant(c, &[1, 2]).await;
}

#[tokio::test]
async fn a_seal_fits_to_the_incarnation_of_the_clock_when_that_is_evicted() {
    let servers = &mut Servers::shared();
    let schedule = async |quorum: &mut Quorum<'_>| a_clock_is_lost(quorum, false).await;
    holds(servers, schedule, "b 2.1, c 3.1").await;
    let lower = ("b 2.1, a 1.1, c 1.2", LOWER);
    is_caught(servers, Rule::Incarnation, schedule, lower).await;
}

#[tokio::test]
async fn a_seal_fits_to_the_incarnation_of_the_clock_when_all_is_flushed() {
    let servers = &mut Servers::own(3).await;
    let schedule = async |quorum: &mut Quorum<'_>| a_clock_is_lost(quorum, true).await;
    holds(servers, schedule, "b 2.1, c 3.1").await;
    let lower = ("b 2.1, a 1.1, c 1.2", LOWER);
    is_caught(servers, Rule::Incarnation, schedule, lower).await;
}

/// The same, but `a` takes another resource of the partition, and its key stays on node 2 with the stamp that it had.
async fn the_key_outlives_the_clock(quorum: &mut Quorum<'_>) {
    let mut a = quorum.request("a").on("sku-2");
    quorum.take(&mut a, &[1, 2]).await;
    quorum.choose(&mut a);
    let b = quorum.request("b");
    quorum.grant(b, &[2, 3]).await;
    quorum.expire(&[2]).await;
    quorum.evict_clock(2).await;
    quorum.take(&mut a, &[2]).await;
    quorum.seal(&mut a, &[1, 2]).await;
    let c = quorum.request("c");
    quorum.grant(c, &[1, 2]).await;
}

#[tokio::test]
async fn a_stamp_that_is_older_than_the_clock_does_not_fit() {
    let (servers, schedule) = (&mut Servers::shared(), the_key_outlives_the_clock);
    holds(servers, schedule, "b 2.1, c 3.1").await;
    let lower = ("b 2.1, a 1.1, c 1.2", LOWER);
    is_caught(servers, Rule::IncarnationOfClock, schedule, lower).await;
}

/// 1. Server 4 is a replica of node 1. 2. `a` is granted a token. 3. Server 4 is promoted, and node 1 goes on: two live
///    servers behind one node. 4. `b` asks server 4 and node 2. 5. `c` asks node 1 and node 3.
async fn a_promotion(quorum: &mut Quorum<'_>) {
    quorum.replicate(4, 1).await;
    let a = quorum.request("a");
    quorum.grant(a, &[1, 2, 3]).await;
    quorum.promote(4, 1).await;
    quorum.expire(&[1, 2, 3, 4]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[4, 2]).await;
    let c = quorum.request("c");
    quorum.grant(c, &[1, 3]).await;
}

/// No script can tell which of the two a client means. So nothing is granted on a server that another one may replace.
#[tokio::test]
async fn a_node_that_has_replicas_or_is_one_is_none() {
    let servers = &mut Servers::own(4).await;
    holds(servers, a_promotion, "a 1.1, b 2.1, c 3.1").await;
    let lower = ("a 1.1, b 2.1, c 1.2", LOWER);
    is_caught(servers, Rule::NodesStandAlone, a_promotion, lower).await;
    let says = async |quorum: &mut Quorum<'_>| {
        assert_eq!(quorum.check(&[1, 4]).await, ["node", "node"]);
        quorum.replicate(4, 1).await;
        assert_eq!(quorum.check(&[1, 4]).await, ["replicated", "replicated"]);
        let mut a = quorum.request("a");
        for server in [1, 4] {
            assert_eq!(quorum.take(&mut a, &[server]).await, ["replicated"]);
        }
    };
    holds(servers, says, "").await;
}
