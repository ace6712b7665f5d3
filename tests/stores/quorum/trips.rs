//! The number of scripts that a node runs for a grant and for a release.

use tower_fence::lease::Leases;

use super::epochs::Site;
use crate::support::lease::{LONG, grant, grant_and_release, sku};

/// Returns the number of scripts that a node has run since its statistics were reset.
async fn scripts(site: &Site, node: usize) -> u64 {
    let stats = site.nodes[node].info("INFO commandstats").await;
    let (_, evalsha) = stats.split_once("cmdstat_evalsha:calls=").unwrap();
    evalsha.split(',').next().unwrap().parse().unwrap()
}

async fn reset(site: &Site) {
    for node in &site.nodes {
        node.command(&["CONFIG", "RESETSTAT"]).await;
    }
}

#[tokio::test]
async fn alternating_issuers_grant_and_release_in_one_round_trip() {
    const TURNS: usize = 20;
    let site = Site::new().await;
    let issuers = [site.issuer().await, site.issuer().await];
    let grants = async |turns: usize| {
        for turn in 0..turns {
            let leases = &issuers[turn % 2];
            grant_and_release(leases).await;
        }
    };
    // The first grants open connections, load scripts, and take an epoch.
    grants(2).await;
    reset(&site).await;
    grants(TURNS).await;
    for node in 0..site.nodes.len() {
        assert_eq!(scripts(&site, node).await, 2 * TURNS as u64, "node {node}");
    }
    // A node whose counter is ahead stays ahead for a grant or two.
    let ahead = format!("HINCRBY {} n 100", site.counter());
    site.nodes[0].send(&ahead).await;
    grants(4).await;
    reset(&site).await;
    grants(TURNS).await;
    for node in 0..site.nodes.len() {
        assert_eq!(scripts(&site, node).await, 2 * TURNS as u64, "node {node}");
    }
}

#[tokio::test]
async fn issuer_without_memory_reads_before_it_releases() {
    let site = Site::new().await;
    let [one, two] = [site.issuer().await, site.issuer().await];
    // The first grant loads the scripts.
    for _ in 0..2 {
        let lease = grant(&one, &sku(), LONG).await;
        reset(&site).await;
        two.release(&sku(), &lease.id).await.unwrap();
    }
    assert_eq!(scripts(&site, 0).await, 2);
    let lease = grant_and_release(&two).await;
    let next = grant(&one, &sku(), LONG).await;
    assert!(next.token > lease.token);
}
