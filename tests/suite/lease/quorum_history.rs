//! Nodes that lose what they know, under load: tokens never repeat and never go back.
//!
//! The majority moves over to nodes that have missed the last grants, and what the two majorities have in common loses
//! something in between. Issuers that remember nothing go on from there. On the same servers at the same time, a
//! counter protected by Redlock is found to go back.

use sqlx::Sqlite;

use super::{
    quorum_load::{Load, only_the_naive_is_harmed},
    quorum_naive::Naive,
};
use crate::support::{
    database::TestDatabase,
    eventually,
    nodes::{NODES, Nodes},
    redis::RedisServer,
};

/// Has each of these groups of nodes lose something in its turn. `prepare` is what happens to them before the last
/// grants that they take part in.
async fn survives(
    options: &[&str],
    groups: &[&[usize]],
    prepare: impl AsyncFn(&RedisServer),
    lose: impl AsyncFn(&mut RedisServer),
) {
    let db = Sqlite::fresh(4).await;
    let mut nodes = Nodes::start(options).await;
    let ours = Load::on_ours(&nodes, &db);
    let naive = Load::on_naive(Naive::new(&nodes.urls(), 3), "naive", &db);
    let more = async |count| {
        ours.more(count).await;
        naive.more(count).await;
    };
    for group in groups {
        more(2).await;
        for node in *group {
            prepare(&nodes.servers[*node]).await;
        }
        // Beside these: one half, then the other.
        let others: Vec<_> = (0..NODES).filter(|node| !group.contains(node)).collect();
        let (former, latter) = others.split_at(others.len() / 2);
        nodes.reach_only(&[former, *group].concat());
        more(4).await;
        nodes.reach_only(group);
        for node in *group {
            lose(&mut nodes.servers[*node]).await;
        }
        ours.forget(&nodes, &db);
        nodes.reach_only(&[latter, *group].concat());
        more(4).await;
        nodes.reach_all();
    }
    more(2).await;
    only_the_naive_is_harmed(ours, naive).await;
}

async fn restart(server: &mut RedisServer) {
    server.kill();
    server.start_again().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_are_restarted_empty_one_after_the_other() {
    let groups: [&[usize]; NODES] = [&[0], &[1], &[2], &[3], &[4]];
    survives(&[], &groups, async |_| {}, restart).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_from_an_old_snapshot() {
    let save = async |server: &RedisServer| drop(server.command(&["SAVE"]).await);
    survives(&[], &[&[2], &[4]], save, restart).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_from_old_snapshots() {
    let save = async |server: &RedisServer| drop(server.command(&["SAVE"]).await);
    survives(&[], &[&[1, 2]], save, restart).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushall_on_one_node_and_on_two() {
    let flush = async |server: &mut RedisServer| drop(server.command(&["FLUSHALL"]).await);
    survives(&[], &[&[3], &[0, 1]], async |_| {}, flush).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eviction_on_one_node() {
    let evict = async |server: &mut RedisServer| {
        server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
        eventually("everything is evicted", async || {
            let refused = server.try_command(&["SET", "junk", "x"]).await;
            let size = server.command(&["DBSIZE"]).await;
            refused.is_err() && size == redis::Value::Int(0)
        })
        .await;
        server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    };
    let options = ["--maxmemory-policy", "allkeys-random"];
    survives(&options, &[&[2], &[3]], async |_| {}, evict).await;
}
