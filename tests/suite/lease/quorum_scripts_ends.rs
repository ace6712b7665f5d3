//! Why an old lease in a quorum is not revived, and a live one not ended. As in `quorum_scripts`, each schedule is
//! played with the scripts as they are, and without a rule.

use crate::support::quorum::{Quorum, Request, Rule, Servers, Violation, holds, is_caught};

const REVIVED: Violation = Violation::OldLeaseRevived;
const ENDED: Violation = Violation::LiveLeaseEnded;

/// 1. `a` is granted a token on all nodes. 2. Its keys on nodes 1 and 2 expire. 3. `b` is granted the next one there.
///    4. Its key on node 1 expires.
async fn a_is_followed_by_b(quorum: &mut Quorum<'_>) -> Request {
    quorum.first_grant().await;
    let a = quorum.request("a");
    let a = quorum.grant(a, &[1, 2, 3]).await;
    quorum.expire(&[1, 2]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[1, 2]).await;
    quorum.expire(&[1]).await;
    a
}

/// `a` asks once more, and takes the key on node 1, which has no token yet. On node 3 it has that of before.
async fn a_key_without_a_token(quorum: &mut Quorum<'_>) {
    let a = a_is_followed_by_b(quorum).await;
    let mut again = quorum.request("a");
    quorum.take(&mut again, &[1]).await;
    quorum.renew(&a, &[1, 3]).await;
}

#[tokio::test]
async fn a_key_without_a_token_is_not_renewed() {
    let (servers, schedule) = (&mut Servers::shared(), a_key_without_a_token);
    holds(servers, schedule, "first 1.1, a 1.2, b 1.3").await;
    let revived = ("first 1.1, a 1.2, b 1.3, a renewed 1.2", REVIVED);
    is_caught(servers, Rule::RenewalNeedsToken, schedule, revived).await;
}

/// `a` asks once more, and a new token is sealed on node 1. On node 3 it has that of before.
async fn two_tokens_of_one_lease(quorum: &mut Quorum<'_>) {
    let a = a_is_followed_by_b(quorum).await;
    let mut again = quorum.request("a");
    quorum.take(&mut again, &[1, 3]).await;
    quorum.choose(&mut again);
    quorum.seal(&mut again, &[1]).await;
    quorum.renew(&a, &[1, 3]).await;
}

#[tokio::test]
async fn a_renewal_finds_the_same_token_on_a_majority() {
    let (servers, schedule) = (&mut Servers::shared(), two_tokens_of_one_lease);
    holds(servers, schedule, "first 1.1, a 1.2, b 1.3").await;
    let revived = ("first 1.1, a 1.2, b 1.3, a renewed 1.2", REVIVED);
    is_caught(servers, Rule::RenewalNeedsSameToken, schedule, revived).await;
}

/// 1. `a` is granted a token on all nodes. 2. Its keys on nodes 1 and 2 expire. 3. `b` is granted the next one there.
///    4. Node 2 is started from a snapshot that has the key of `a`.
async fn a_comes_back(quorum: &mut Quorum<'_>) -> Request {
    quorum.first_grant().await;
    let a = quorum.request("a");
    let a = quorum.grant(a, &[1, 2, 3]).await;
    let snapshot = quorum.snapshot(2);
    quorum.expire(&[1, 2]).await;
    let b = quorum.request("b");
    quorum.grant(b, &[1, 2]).await;
    quorum.restart_from(2, snapshot).await;
    a
}

/// `a` is renewed.
async fn a_snapshot_is_renewed(quorum: &mut Quorum<'_>) {
    let a = a_comes_back(quorum).await;
    quorum.renew(&a, &[2, 3]).await;
}

/// `a` is to have another token.
async fn a_snapshot_gets_another_token(quorum: &mut Quorum<'_>) {
    a_comes_back(quorum).await;
    let renewal = quorum.request("a").only_mine();
    quorum.grant(renewal, &[2, 3]).await;
}

/// A lease of another resource gives nodes 2 and 3 a clock again, and `a` asks once more.
async fn a_snapshot_is_asked_for(quorum: &mut Quorum<'_>) {
    a_comes_back(quorum).await;
    let other = quorum.request("other").on("sku-2");
    quorum.grant(other, &[2, 3]).await;
    let again = quorum.request("a");
    quorum.grant(again, &[2, 3]).await;
}

#[tokio::test]
async fn a_lease_from_a_snapshot_is_not_renewed() {
    let servers = &mut Servers::with_files().await;
    let all = "first 1.1, a 1.2, b 1.3";
    holds(servers, a_snapshot_is_renewed, all).await;
    let revived = ("first 1.1, a 1.2, b 1.3, a renewed 1.2", REVIVED);
    let rule = Rule::RenewalNeedsHistory;
    is_caught(servers, rule, a_snapshot_is_renewed, revived).await;

    holds(servers, a_snapshot_gets_another_token, all).await;
    let revived = ("first 1.1, a 1.2, b 1.3, a renewed 2.1", REVIVED);
    let rule = Rule::NewTokenNeedsHistory;
    is_caught(servers, rule, a_snapshot_gets_another_token, revived).await;
}

#[tokio::test]
async fn a_token_from_a_snapshot_is_not_answered_again() {
    let (servers, schedule) = (&mut Servers::with_files().await, a_snapshot_is_asked_for);
    holds(
        servers,
        schedule,
        "first 1.1, a 1.2, b 1.3, other 2.1, a 2.2",
    )
    .await;
    let lower = (
        "first 1.1, a 1.2, b 1.3, other 2.1, a 1.2",
        Violation::LowerToken,
    );
    is_caught(servers, Rule::HistoryOfStoredToken, schedule, lower).await;
}

/// 1. A release of `a` has looked, and is slow. 2. It is repeated, and `a` is released. 3. `a` is granted again, under
///    the same id. 4. The first release goes on.
async fn a_slow_release(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let a = quorum.request("a");
    let a = quorum.grant(a, &[1, 2, 3]).await;
    let slow = quorum.look(&a, &[1, 2, 3]).await;
    let repeated = quorum.look(&a, &[1, 2, 3]).await;
    quorum.end(&a, &repeated).await;
    let again = quorum.request("a");
    let again = quorum.grant(again, &[1, 2, 3]).await;
    quorum.end(&a, &slow).await;
    quorum.renew_live(&again, &[1, 2, 3]).await;
}

#[tokio::test]
async fn a_release_ends_what_it_has_found() {
    let servers = &mut Servers::shared();
    let all = "first 1.1, a 1.2, a 1.3, a renewed 1.3";
    holds(servers, a_slow_release, all).await;
    let ended = ("first 1.1, a 1.2, a 1.3, a lost 1.3", ENDED);
    let rule = Rule::ReleaseOfWhatWasFound;
    is_caught(servers, rule, a_slow_release, ended).await;
}

/// 1. An attempt of `a` is slow. 2. The next one is granted on nodes 1 and 2. 3. The first one takes nodes 2 and 3,
///    and seals node 2. 4. It gives up, and takes back what it has left.
async fn an_older_attempt(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut slow = quorum.request("a");
    let next = quorum.request("a");
    let next = quorum.grant(next, &[1, 2]).await;
    quorum.take(&mut slow, &[2, 3]).await;
    quorum.choose(&mut slow);
    quorum.seal(&mut slow, &[2]).await;
    quorum.clean_up(&slow, &[2, 3]).await;
    quorum.renew_live(&next, &[1, 2, 3]).await;
}

#[tokio::test]
async fn an_older_attempt_does_not_follow_a_newer_one() {
    let servers = &mut Servers::shared();
    let all = "first 1.1, a 1.2, a renewed 1.2";
    holds(servers, an_older_attempt, all).await;
    let ended = ("first 1.1, a 1.2, a lost 1.2", ENDED);
    is_caught(servers, Rule::NewerAttemptsOnly, an_older_attempt, ended).await;
}

/// 1. An attempt of `a` takes nodes 1 and 2, seals node 1, and gives up. 2. The next one asks nodes 2 and 3, and is
///    granted the same token. 3. The first one takes back what it has left.
async fn a_slow_clean_up(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let mut first = quorum.request("a");
    quorum.take(&mut first, &[1, 2]).await;
    quorum.choose(&mut first);
    quorum.seal(&mut first, &[1]).await;
    let next = quorum.request("a");
    let next = quorum.grant(next, &[2, 3]).await;
    quorum.clean_up(&first, &[1, 2, 3]).await;
    quorum.renew_live(&next, &[1, 2, 3]).await;
}

/// 1. `a` is granted. 2. A repetition takes two of its keys, and gives up. 3. It takes back what it has left.
async fn a_repetition_that_fails(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let a = quorum.request("a");
    let a = quorum.grant(a, &[1, 2, 3]).await;
    let mut again = quorum.request("a");
    quorum.take(&mut again, &[1, 2]).await;
    quorum.clean_up(&again, &[1, 2]).await;
    quorum.renew_live(&a, &[1, 2, 3]).await;
}

/// 1. A repetition of `a` takes node 2, where its key expires. 2. `a` is granted a token on nodes 1 and 2. 3. The repetition
///    takes node 3, and chooses the same token by nodes 2 and 3. 4. What it had sent to node 1 arrives. 5. It gives up, and
///    takes back what it has left.
async fn a_repetition_that_chose_the_same(quorum: &mut Quorum<'_>) {
    quorum.first_grant().await;
    let a = quorum.request("a");
    let mut again = quorum.request("a");
    quorum.take(&mut again, &[2]).await;
    quorum.expire(&[2]).await;
    let a = quorum.grant(a, &[1, 2]).await;
    quorum.take(&mut again, &[3]).await;
    quorum.choose(&mut again);
    quorum.take(&mut again, &[1]).await;
    quorum.clean_up(&again, &[1, 2, 3]).await;
    quorum.renew_live(&a, &[1, 2, 3]).await;
}

#[tokio::test]
async fn an_attempt_takes_back_what_it_has_left_itself() {
    let servers = &mut Servers::shared();
    let all = "first 1.1, a 1.2, a renewed 1.2";
    let ended = ("first 1.1, a 1.2, a lost 1.2", ENDED);
    holds(servers, a_slow_clean_up, all).await;
    is_caught(servers, Rule::CleanUpOfAttempt, a_slow_clean_up, ended).await;
    holds(servers, a_repetition_that_fails, all).await;
    let rule = Rule::CleanUpOfToken;
    is_caught(servers, rule, a_repetition_that_fails, ended).await;
    let schedule = a_repetition_that_chose_the_same;
    holds(servers, schedule, all).await;
    is_caught(servers, Rule::CleanUpWhereSealed, schedule, ended).await;
}
