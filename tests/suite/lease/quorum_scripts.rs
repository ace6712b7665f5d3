//! Why a quorum takes and seals as it does. Each schedule is the story of a lost rule: with the scripts as they are
//! nothing happens in it, and without the rule they are caught.
//!
//! `a 1.2` reads: the lease `a` was granted with token 2 of epoch 1.

use std::sync::{Arc, Mutex};

use tower_fence::{
    epochs::{Epoch, EpochFuture, Epochs, SourceId},
    lease::{Leases, QuorumLeases},
};

use crate::support::{
    lease::{LONG, grant, sku},
    quorum::{Quorum, Rule, Servers, Violation, holds, is_caught},
    redis::{fresh_prefix, shared_node_urls},
};

const TWICE: Violation = Violation::SameTokenTwice;

/// 1. `a` takes its keys, chooses a token, and is slow. 2. Its keys expire. 3. `b` is granted that token, as no clock
///    has counted it. 4. The seals of `a` arrive.
async fn slow_seals(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut a = quorum.request("a");
    quorum.take(&mut a, &[1, 2, 3]).await;
    quorum.choose(&mut a);
    quorum.expire(&[1, 2, 3]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[1, 2, 3]).await;
    quorum.seal(&mut a, &[1, 2]).await;
}

#[tokio::test]
async fn a_seal_finds_the_lease_that_was_taken_or_nothing() {
    let servers = &mut Servers::shared();
    holds(servers, slow_seals, "first 1.1, b 1.2").await;
    let twice = ("first 1.1, b 1.2, a 1.2", TWICE);
    is_caught(servers, Rule::LeaseWhenSealing, slow_seals, twice).await;
}

/// 1. `a` takes its keys, and seals one. 2. The others expire. 3. `b` takes those, which have not counted the token.
async fn one_seal(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut a = quorum.request("a");
    quorum.take(&mut a, &[1, 2, 3]).await;
    quorum.choose(&mut a);
    quorum.seal(&mut a, &[1]).await;
    quorum.expire(&[2, 3]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[2, 3]).await;
}

#[tokio::test]
async fn a_grant_is_sealed_on_a_majority() {
    let servers = &mut Servers::shared();
    holds(servers, one_seal, "first 1.1, b 1.2").await;
    let twice = ("first 1.1, a 1.2, b 1.2", TWICE);
    is_caught(servers, Rule::SealOnMajority, one_seal, twice).await;
}

/// 1. `a` takes its keys, and seals none. 2. They expire. 3. `b` takes them.
async fn no_seal(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut a = quorum.request("a");
    quorum.take(&mut a, &[1, 2, 3]).await;
    quorum.choose(&mut a);
    quorum.expire(&[1, 2, 3]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[1, 2, 3]).await;
}

#[tokio::test]
async fn what_is_taken_is_not_granted() {
    let servers = &mut Servers::shared();
    holds(servers, no_seal, "first 1.1, b 1.2").await;
    let twice = ("first 1.1, a 1.2, b 1.2", TWICE);
    is_caught(servers, Rule::Seal, no_seal, twice).await;
}

/// 1. `a` is granted a token of which node 3 hears nothing. 2. Its keys expire. 3. Node 3 is the first to answer `b`.
async fn a_node_that_missed_the_last_grant(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let a = quorum.request("a");
    quorum.grant(a, &[1, 2]).await;
    quorum.expire(&[1, 2]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[3, 1]).await;
}

#[tokio::test]
async fn a_token_is_above_the_clocks_of_a_majority() {
    let servers = &mut Servers::shared();
    let schedule = a_node_that_missed_the_last_grant;
    holds(servers, schedule, "first 1.1, a 1.2, b 1.3").await;
    let twice = ("first 1.1, a 1.2, b 1.2", TWICE);
    is_caught(servers, Rule::HighestOfMajority, schedule, twice).await;
}

/// 1. `a` takes nodes 1 and 2, chooses, and seals node 1. 2. Its other key expires. 3. `b` is granted that token on
///    nodes 2 and 3. 4. Its key on node 3 expires. 5. `a` takes that, too: the clock there has the token already.
async fn a_late_answer(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut a = quorum.request("a");
    quorum.take(&mut a, &[1, 2]).await;
    quorum.choose(&mut a);
    quorum.seal(&mut a, &[1]).await;
    quorum.expire(&[2]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[2, 3]).await;
    quorum.expire(&[3]).await;
    quorum.take(&mut a, &[3]).await;
    quorum.seal(&mut a, &[3]).await;
}

#[tokio::test]
async fn only_nodes_are_sealed_whose_clocks_were_counted() {
    let servers = &mut Servers::shared();
    holds(servers, a_late_answer, "first 1.1, b 1.2").await;
    let twice = ("first 1.1, b 1.2, a 1.2", TWICE);
    is_caught(servers, Rule::SealWhereCounted, a_late_answer, twice).await;
}

/// 1. `a` takes its keys and chooses. 2. Two of them expire. 3. `b` is granted that token on those nodes. 4. A key of
///    `b` expires. 5. What `a` has sent to take it arrives once more. 6. The seals of `a` arrive.
async fn a_key_is_taken_twice(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut a = quorum.request("a");
    quorum.take(&mut a, &[1, 2, 3]).await;
    quorum.choose(&mut a);
    quorum.expire(&[1, 2]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[1, 2]).await;
    quorum.expire(&[1]).await;
    quorum.take(&mut a, &[1]).await;
    quorum.seal(&mut a, &[1, 3]).await;
}

#[tokio::test]
async fn a_seal_fits_to_the_key_that_was_taken_and_to_no_later_one() {
    let servers = &mut Servers::shared();
    holds(servers, a_key_is_taken_twice, "first 1.1, b 1.2").await;
    let twice = ("first 1.1, b 1.2, a 1.2", TWICE);
    let rule = Rule::StampBesideAttempt;
    is_caught(servers, rule, a_key_is_taken_twice, twice).await;
}

/// The obvious protocol: set a key on a majority, take the highest clock plus one, write that back if the lease id is
/// still there. As above, but `a` asks again, by the next attempt.
async fn a_request_is_repeated(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut a = quorum.request("a");
    quorum.take(&mut a, &[1, 2, 3]).await;
    quorum.choose(&mut a);
    quorum.expire(&[1, 2]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[1, 2]).await;
    quorum.expire(&[1]).await;
    let mut again = quorum.request("a");
    quorum.take(&mut again, &[1]).await;
    quorum.seal(&mut a, &[1, 3]).await;
}

#[tokio::test]
async fn the_lease_id_alone_does_not_make_a_seal_fit() {
    let servers = &mut Servers::shared();
    holds(servers, a_request_is_repeated, "first 1.1, b 1.2").await;
    let twice = ("first 1.1, b 1.2, a 1.2", TWICE);
    let rule = Rule::StampBesideLeaseId;
    is_caught(servers, rule, a_request_is_repeated, twice).await;
}

/// 1. `a` takes another resource of the partition, chooses, and is slow. 2. `b` and `c` are granted this one, one
///    after the other. 3. The seals of `a` arrive, for a token below that of `c`. 4. `d` asks.
async fn another_resource(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut a = quorum.request("a").on("sku-2");
    quorum.take(&mut a, &[1, 2]).await;
    quorum.choose(&mut a);
    for lease in ["b", "c"] {
        let request = quorum.request(lease);
        quorum.grant(request, &[1, 2]).await;
        quorum.expire(&[1, 2]).await;
    }
    quorum.seal(&mut a, &[1, 2]).await;
    let d = quorum.request("d");
    quorum.grant(d, &[1, 2]).await;
}

#[tokio::test]
async fn no_seal_turns_a_clock_back() {
    let servers = &mut Servers::shared();
    let all = "first 1.1, b 1.2, c 1.3, a 1.2, d 1.4";
    holds(servers, another_resource, all).await;
    let twice = ("first 1.1, b 1.2, c 1.3, a 1.2, d 1.3", TWICE);
    is_caught(servers, Rule::HigherOfBoth, another_resource, twice).await;
}

/// 1. `a` takes another resource of the partition on nodes 1 and 3, chooses, and is slow. 2. Node 2 loses its clock.
///    3. `b` is granted a token of the next epoch on nodes 2 and 3. 4. The seals of `a` arrive, with a higher number.
///    5. `c` asks.
async fn a_higher_number(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut a = quorum.request("a").on("sku-2");
    quorum.take(&mut a, &[1, 3]).await;
    quorum.choose(&mut a);
    quorum.evict_clock(2).await;
    let b = quorum.request("b");
    quorum.grant(b, &[2, 3]).await;
    quorum.expire(&[2, 3]).await;
    quorum.seal(&mut a, &[1, 3]).await;
    let c = quorum.request("c");
    quorum.grant(c, &[1, 3]).await;
}

#[tokio::test]
async fn numbers_are_compared_within_an_epoch() {
    let servers = &mut Servers::shared();
    let all = "first 1.1, b 2.1, a 1.2, c 2.2";
    holds(servers, a_higher_number, all).await;
    let lower = ("first 1.1, b 2.1, a 1.2, c 1.3", Violation::LowerToken);
    is_caught(servers, Rule::NumbersOfOneEpoch, a_higher_number, lower).await;
}

/// 1. `a` takes its keys, and seals two of them. 2. The source of epochs says that this one is over. 3. `a` takes its
///    keys once more, and is granted a token of the next epoch on nodes 1 and 3. 4. The third seal of before arrives.
async fn an_epoch_is_over(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut a = quorum.request("a");
    quorum.take(&mut a, &[1, 2, 3]).await;
    quorum.choose(&mut a);
    let [one, two, late] = [1, 2, 3].map(|node| quorum.send_seal(&a, node));
    quorum.arrives(&a, one).await;
    quorum.arrives(&a, two).await;
    quorum.begin_anew(&mut a);
    quorum.take(&mut a, &[1, 2, 3]).await;
    quorum.choose(&mut a);
    quorum.seal(&mut a, &[1, 3]).await;
    quorum.arrives(&a, late).await;
    quorum.renew(&a, &[1, 2, 3]).await;
}

#[tokio::test]
async fn an_attempt_chooses_one_token() {
    let servers = &mut Servers::shared();
    let all = "first 1.1, a 2.1, a renewed 2.1";
    holds(servers, an_epoch_is_over, all).await;
    let lower = ("first 1.1, a 2.1, a renewed 1.2", Violation::LowerToken);
    is_caught(servers, Rule::OneChoice, an_epoch_is_over, lower).await;
}

/// 1. The resource of `a` has seen a token from elsewhere, so `a` gets a higher one. The clock does not follow. 2. `a`
///    asks for another token.
async fn a_token_from_elsewhere(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let a = quorum.request("a");
    quorum.grant(a, &[1, 2, 3]).await;
    let above = quorum.request("a").only_mine().at_least(7, 5);
    quorum.grant(above, &[1, 2, 3]).await;
    let another = quorum.request("a").only_mine();
    quorum.grant(another, &[1, 2, 3]).await;
}

#[tokio::test]
async fn another_token_of_a_lease_is_above_the_one_that_it_has() {
    let servers = &mut Servers::shared();
    let all = "first 1.1, a 1.2, a renewed 7.5, a renewed 7.6";
    holds(servers, a_token_from_elsewhere, all).await;
    let lower = "first 1.1, a 1.2, a renewed 7.5, a renewed 1.4";
    let (rule, lower) = (Rule::AboveStoredToken, (lower, Violation::LowerToken));
    is_caught(servers, rule, a_token_from_elsewhere, lower).await;
}

/// A source that says of the first epoch that it is over, and looks at what stands in a node then.
struct Over {
    url: String,
    key: String,
    seen: Arc<Mutex<Vec<String>>>,
}

async fn value(url: &str, key: &str) -> String {
    let client = redis::Client::open(url).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let mut get = redis::cmd("GET");
    get.arg(key).query_async(&mut connection).await.unwrap()
}

impl Epochs for Over {
    fn next_epoch(&self, _: u8, at_least: Epoch) -> EpochFuture<'_> {
        Box::pin(async move { Ok(at_least) })
    }

    fn bring_back(&self, _: u8, seen: Epoch) -> EpochFuture<'_> {
        Box::pin(async move {
            let value = value(&self.url, &self.key).await;
            self.seen.lock().unwrap().push(value);
            Ok(seen.max(Epoch::new(2)?))
        })
    }

    fn source_id(&self) -> EpochFuture<'_, SourceId> {
        Box::pin(async { Ok(SourceId::new("over").unwrap()) })
    }
}

#[tokio::test]
async fn the_store_begins_another_attempt_for_another_token() {
    let (prefix, urls) = (fresh_prefix(), shared_node_urls());
    let key = format!("{prefix}:quorum:{{110}}:lease:sku-1");
    let seen = Arc::new(Mutex::new(vec![]));
    let connect = async || {
        let (url, key, seen) = (urls[0].clone(), key.clone(), seen.clone());
        let builder = QuorumLeases::builder(Over { url, key, seen }).key_prefix(&prefix);
        let builder = builder.node_wait(LONG).command_wait(LONG);
        let urls: Vec<_> = urls.iter().map(String::as_str).collect();
        builder.connect(&urls).await.unwrap()
    };
    let leases = connect().await;
    let first = grant(&leases, &sku(), LONG).await;
    leases.release(&sku(), &first.id).await.unwrap();
    assert!(seen.lock().unwrap().is_empty());
    // Another issuer has not been told of the epoch in which the nodes count.
    let lease = grant(&connect().await, &sku(), LONG).await;
    assert_eq!(lease.token.get(), 2_000_000_001);
    let before = seen.lock().unwrap().pop().expect("the source was asked");
    let after = value(&urls[0], &key).await;
    let number = |value: &str| value.split(':').nth(1).unwrap().parse::<u64>().unwrap();
    assert!(before.contains(":1000000002:"), "{before}");
    assert!(after.contains(":2000000001:"), "{after}");
    assert!(number(&after) > number(&before), "{before} {after}");
}
