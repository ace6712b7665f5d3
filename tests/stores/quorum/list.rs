//! Listing the leases of a quorum.

use std::collections::HashSet;

use futures_util::StreamExt;
use sqlx::Sqlite;
use tower_fence::{
    Resource,
    lease::{Lease, LeaseAdmin, Leases},
};
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use crate::support::{
    PATIENCE,
    database::{Fresh, TestDatabase},
    lease::{LONG, grant},
    redis::{delete_keys, fresh_prefix, keys, shared_node_urls},
};

async fn leases(db: &Fresh<Sqlite>, prefix: &str) -> QuorumLeases {
    let urls = shared_node_urls();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let epochs = db.fence_with(|fence| fence.pool_timeout(PATIENCE));
    let builder = QuorumLeasesBuilder::new(epochs).key_prefix(prefix);
    let builder = builder.node_timeout(PATIENCE);
    builder.connect(&urls).await.unwrap()
}

/// Deletes the lease on the first node, so that two of three nodes have it.
async fn take_from_the_first_node(prefix: &str, resource: &Resource) {
    let (first, pattern) = (
        &shared_node_urls()[0],
        format!("{prefix}:*:lease:{resource}"),
    );
    assert_eq!(keys(first, &pattern).await.len(), 1);
    delete_keys(first, &pattern).await;
}

#[tokio::test]
async fn leases_held_throughout_a_listing_are_on_its_pages() {
    let (db, prefix) = (Sqlite::fresh(2).await, fresh_prefix());
    let leases = leases(&db, &prefix).await;
    let granting = (0..3_000).map(|n| {
        let (leases, name) = (leases.clone(), Resource::new(format!("sku-{n}")).unwrap());
        async move { grant(&leases, &name, LONG * 5).await }
    });
    let granting = futures_util::stream::iter(granting).buffer_unordered(40);
    let granted: Vec<_> = granting.collect().await;
    // Some leases end between two pages.
    let (mut ending, kept) = (granted[..200].iter(), &granted[200..]);
    let (mut listed, mut cursor) = (HashSet::new(), None);
    loop {
        let page = leases.list(100, cursor.as_deref()).await.unwrap();
        for (resource, _) in page.leases {
            let is_new = listed.insert(resource.clone());
            assert!(is_new, "{resource} is listed twice");
        }
        for lease in ending.by_ref().take(5) {
            leases.release(&lease.resource, &lease.id).await.unwrap();
        }
        match page.cursor {
            None => break,
            next => cursor = next,
        }
    }
    let is_missed = |lease: &&Lease| !listed.contains(&lease.resource);
    let missed: Vec<_> = kept.iter().filter(is_missed).collect();
    assert!(missed.is_empty(), "{} leases are missing", missed.len());
}

#[tokio::test]
async fn page_filled_by_several_nodes_respects_its_limit() {
    let (db, prefix) = (Sqlite::fresh(2).await, fresh_prefix());
    let leases = leases(&db, &prefix).await;
    let names = ["a", "b", "c"].map(|name| Resource::new(name).unwrap());
    for name in &names {
        grant(&leases, name, LONG).await;
    }
    for name in &names[1..] {
        take_from_the_first_node(&prefix, name).await;
    }
    let first = leases.list(2, None).await.unwrap();
    let second = leases.list(2, first.cursor.as_deref()).await.unwrap();
    assert_eq!((first.leases.len(), second.leases.len()), (2, 1));
    let both = first.leases.into_iter().chain(second.leases);
    let listed: HashSet<_> = both.map(|(resource, _)| resource).collect();
    assert_eq!(listed, HashSet::from(names));
    // A page of size 0 would lead to the same page again, so each page has at least one lease.
    assert_eq!(leases.list(0, None).await.unwrap().leases.len(), 1);
}
