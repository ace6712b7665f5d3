//! Listing the leases of a quorum, from cursors that nobody was given.

use std::collections::HashSet;

use sqlx::Sqlite;
use tower_fence::{
    Resource,
    lease::{ListError, Operate, QuorumLeases},
};

use crate::support::{
    database::TestDatabase,
    lease::{LONG, grant},
    redis::{fresh_prefix, shared_node_urls},
};

#[tokio::test]
async fn a_forged_cursor_lists_nothing_twice() {
    let (db, urls) = (Sqlite::fresh(2).await, shared_node_urls());
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let builder = QuorumLeases::builder(db.fence()).key_prefix(fresh_prefix());
    let builder = builder.node_wait(std::time::Duration::from_secs(2));
    let leases = builder.connect(&urls).await.unwrap();
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
