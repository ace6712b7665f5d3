//! Listing the leases of a quorum, from cursors that nobody was given.

use std::{collections::HashSet, time::Duration};

use sqlx::Sqlite;
use tower_fence::{
    Resource,
    lease::{ListError, Operate, QuorumLeases},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    lease::{LONG, grant, sku},
    redis::{fresh_prefix, shared_node_urls},
};

async fn leases(db: &Fresh<Sqlite>, prefix: &str) -> QuorumLeases {
    let urls = shared_node_urls();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let builder = QuorumLeases::builder(db.fence()).key_prefix(prefix);
    let builder = builder.node_wait(Duration::from_secs(2));
    builder.connect(&urls).await.unwrap()
}

/// Without it two of three nodes have the lease.
async fn take_from_the_first_node(prefix: &str, resource: &Resource) {
    let first = redis::Client::open(shared_node_urls().remove(0)).unwrap();
    let mut first = first.get_multiplexed_async_connection().await.unwrap();
    let mut keys = redis::cmd("KEYS");
    keys.arg(format!("{prefix}:*:lease:{resource}"));
    let keys: Vec<String> = keys.query_async(&mut first).await.unwrap();
    assert_eq!(keys.len(), 1);
    let mut delete = redis::cmd("DEL");
    let deleted: u64 = delete.arg(&keys).query_async(&mut first).await.unwrap();
    assert_eq!(deleted, 1);
}

#[tokio::test]
async fn a_forged_cursor_lists_nothing_twice() {
    let (db, prefix) = (Sqlite::fresh(2).await, fresh_prefix());
    let leases = leases(&db, &prefix).await;
    for n in 0..10 {
        grant(&leases, &Resource::new(format!("sku-{n}")).unwrap(), LONG).await;
    }
    for node in 0..5 {
        for skipped in (0..16).chain([1 << 32, 1 << 63, u64::MAX]) {
            let forged = format!("{node}-0-{skipped}-");
            let (mut listed, mut cursor) = (HashSet::new(), Some(forged.clone()));
            let mut is_refused = false;
            while let Some(at) = cursor.take() {
                let page = match leases.list(3, Some(&at)).await {
                    Ok(page) => page,
                    Err(ListError::Cursor) if at == forged => {
                        is_refused = true;
                        break;
                    }
                    Err(error) => panic!("{error}"),
                };
                for (resource, _) in page.leases {
                    assert!(listed.insert(resource.clone()), "{forged}: {resource}");
                }
                cursor = page.cursor;
            }
            // What a page has: the nodes that were passed over come before this one, and are no majority.
            let is_given = node < 3 && skipped < 1 << node && skipped.count_ones() < 2;
            assert_eq!(is_refused, !is_given, "{forged}");
            // Nobody has listed them yet.
            if forged == "0-0-0-" || forged == "1-0-1-" {
                assert_eq!(listed.len(), 10, "{forged}");
            }
        }
    }
}

/// The first node has not got it, and the second one was away when it was asked.
#[tokio::test]
async fn a_lease_that_two_nodes_have_is_listed_by_the_second_where_the_first_was_passed_over() {
    let (db, prefix) = (Sqlite::fresh(2).await, fresh_prefix());
    let leases = leases(&db, &prefix).await;
    grant(&leases, &sku(), LONG).await;
    take_from_the_first_node(&prefix, &sku()).await;
    let (mut listed, mut cursor) = (vec![], Some("2-0-2-".to_owned()));
    while let Some(at) = cursor {
        // The full page may be the last one, which leads nowhere.
        let page = leases.list(1, Some(&at)).await.unwrap();
        listed.extend(page.leases.into_iter().map(|(resource, _)| resource));
        cursor = page.cursor;
    }
    assert_eq!(listed, [sku()]);
}

#[tokio::test]
async fn a_page_that_more_than_one_node_fills_has_no_more_than_was_asked_for() {
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
    // A page without room would be followed by itself.
    assert_eq!(leases.list(0, None).await.unwrap().leases.len(), 1);
}
