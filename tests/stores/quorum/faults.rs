//! Faults of nodes under load: a node is unreachable, frozen or slow, or has a wrong clock. Grants
//! continue while a majority of the nodes answers, and stop otherwise.
//!
//! Two broken protocols run under the same load on the same servers. The load shows the fault of
//! each protocol. One protocol needs all nodes, and grants no lease during a fault. The other one
//! needs two of five nodes, and lets two clients hold a lease at the same time.

use std::time::Duration;

use axum::Router;
use futures_util::future::join_all;
use serde_json::json;
use sqlx::Sqlite;
use tokio::time::{Instant, timeout};
use tower_fence::{
    Resource, issuer,
    lease::{Leases, Renew},
};

use super::{
    load::{Hold, Load, harm, held_at_once, only_the_naive_is_harmed},
    naive::Naive,
};
use crate::support::{
    database::TestDatabase,
    eventually,
    http::{Answer, Server},
    lease::{LONG, grant, is_unavailable, keeps_its_token},
    nodes::{NODE_WAIT, NODES, Nodes},
    proxy::Link,
    redis::{RedisServer, keys},
    wall_clock::WallClock,
};

/// Options with which the data, and therefore the leases, survive `kill -9`.
const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "no"];

fn is_harmed(holds: &[Hold]) -> bool {
    harm(holds).is_some() || held_at_once(holds).is_some()
}

/// Checks that grants continue during the fault and after it, without a delay by nodes that do not
/// answer.
async fn goes_on(begin: impl AsyncFn(&mut Nodes), end: impl AsyncFn(&mut Nodes)) {
    let db = Sqlite::fresh(4).await;
    let mut nodes = Nodes::start(&DURABLE).await;
    let ours = Load::on_ours(&nodes, &db);
    let all = Load::on_naive(Naive::new(&nodes.urls(), NODES), "all", &db);
    let few = Load::on_naive(Naive::new(&nodes.urls(), 2), "few", &db);
    all.more(1).await;
    eventually!(
        "two of five nodes let two clients hold a lease",
        is_harmed(&few.holds())
    );
    few.stop().await;
    begin(&mut nodes).await;
    let began = Instant::now();
    ours.more(5).await;
    eventually("no request waits for a late node", async || {
        let took = |hold: &Hold| hold.grant.ended - hold.grant.began;
        let holds = ours.holds_since(began);
        // A request that waits for an unavailable node takes at least twice this time.
        holds.iter().filter(|hold| took(hold) < NODE_WAIT).count() > 5
    })
    .await;
    // No grant succeeds without all nodes.
    let in_spite_of_it = all.stop().await;
    let in_spite_of_it = in_spite_of_it.iter().find(|hold| hold.grant.began > began);
    assert!(in_spite_of_it.is_none(), "{in_spite_of_it:?}");
    end(&mut nodes).await;
    ours.more(3).await;
    let holds = ours.stop().await;
    assert_eq!(harm(&holds), None);
    assert_eq!(held_at_once(&holds).map(|pair| format!("{pair:?}")), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_continue_after_two_nodes_are_killed() {
    let kill = async |nodes: &mut Nodes| {
        nodes.servers[0].kill();
        nodes.servers[3].kill();
    };
    let restart = async |nodes: &mut Nodes| {
        nodes.servers[0].start_again().await;
        nodes.servers[3].start_again().await;
    };
    goes_on(kill, restart).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_continue_with_two_frozen_nodes() {
    let signal = |signal| {
        async move |nodes: &mut Nodes| {
            nodes.servers[2].signal(signal);
            nodes.servers[4].signal(signal);
        }
    };
    goes_on(signal("-STOP"), signal("-CONT")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_continue_with_a_partitioned_and_a_silent_node() {
    let cut = async |nodes: &mut Nodes| {
        nodes.proxies[0].set(Link::Cut);
        nodes.proxies[1].set(Link::Silent);
    };
    goes_on(cut, async |nodes| nodes.reach_all()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_continue_with_a_slow_node() {
    let slow_down = |delay| async move |nodes: &mut Nodes| nodes.proxies[2].slow_down(delay);
    goes_on(slow_down(NODE_WAIT), slow_down(Duration::ZERO)).await;
}

/// Without a majority, no lease is granted, and requests are answered within the timeouts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_stop_after_three_nodes_are_killed() {
    let db = Sqlite::fresh(4).await;
    let mut nodes = Nodes::start(&[]).await;
    let ours = Load::on_ours(&nodes, &db);
    let few = Load::on_naive(Naive::new(&nodes.urls(), 2), "few", &db);
    ours.more(5).await;
    let leases = nodes.leases(&db);
    let held = grant(&leases, &Resource::new("sku-3").unwrap(), LONG).await;
    let router = issuer::router(leases.clone());
    let server = Server::start(Router::new().nest("/locks", router)).await;

    for node in [0, 2, 4] {
        nodes.servers[node].kill();
    }
    let began = Instant::now();
    let body = json!({ "ttl_ms": 10_000 });
    let acquire = || server.post("/locks/sku-1").json(&body);
    let answer = timeout(Duration::from_secs(10), Answer::to(acquire())).await;
    let answer = answer.expect("no answer within the timeouts");
    answer.is_problem(503, "store-unavailable");
    assert!(answer.headers.contains_key("retry-after"));
    let renewed = leases.renew(&held.resource, &held.id, Renew::new(LONG));
    is_unavailable(renewed.await);
    is_unavailable(leases.inspect(&held.resource).await);
    is_unavailable(leases.release(&held.resource, &held.id).await);
    few.more(3).await;
    assert!(!few.holds_since(began).is_empty());
    let without_a_majority = ours.holds_since(began);
    assert!(without_a_majority.is_empty(), "{without_a_majority:?}");

    // The node restarts without data.
    nodes.servers[2].start_again().await;
    ours.more(5).await;
    eventually!(
        "a lease is granted over HTTP",
        Answer::to(acquire()).await.status == 201
    );
    assert_eq!(harm(&ours.stop().await), None);
    few.stop().await;
}

/// After the jump, the keys of the node expire immediately or stay for days, and tokens that are
/// derived from the time decrease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wall_clock_jump_of_a_node_ends_no_lease() {
    let db = Sqlite::fresh(4).await;
    let clock = WallClock::right();
    let mut servers = join_all((1..NODES).map(|_| RedisServer::start(&[]))).await;
    servers.push(RedisServer::start_with(&[], &clock.variables()).await);
    let nodes = Nodes::of(servers).await;
    let ours = Load::on_ours(&nodes, &db);
    let by_time = Load::on_naive(Naive::by_time(&nodes.urls()), "by time", &db);
    let leases = nodes.leases(&db);
    let resource = Resource::new("sku-3").unwrap();
    let held = grant(&leases, &resource, LONG).await;
    let stored = async || {
        let url = nodes.servers[NODES - 1].url();
        keys(&url, "*:lease:sku-3").await.len()
    };
    assert_eq!(stored().await, 1);
    for jump in ["+1d", "-1d", "+10y", "+0"] {
        clock.jump_to(jump);
        ours.more(3).await;
        by_time.more(3).await;
        assert_eq!(stored().await, 0);
        keeps_its_token(&leases, &held).await;
    }
    only_the_naive_is_harmed(ours, by_time).await;
}
