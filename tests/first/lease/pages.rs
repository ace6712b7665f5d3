//! The pages of a list, in the stores that return full pages.

use sqlx::Postgres as PostgresDatabase;
use tower_fence::{
    Resource,
    lease::{LeaseAdmin, LeaseError, PostgresLeases},
};

use crate::support::{
    database::TestDatabase,
    lease::{LONG, grant, sku},
    store::{Memory, Postgres, TestStore},
};

async fn a_page_is_full_where_more_follows_and_the_last_one_leads_nowhere<S: TestStore>() {
    let (one, two, _db) = S::fresh().await;
    let names = ["a", "b", "c", "d"].map(|name| Resource::new(name).unwrap());
    for name in &names {
        grant(&one, name, LONG).await;
    }
    let (mut listed, mut cursor) = (vec![], None);
    for more_follows in [true, false] {
        let page = two.list(2, cursor.as_deref()).await.unwrap();
        assert_eq!(
            (page.leases.len(), page.cursor.is_some()),
            (2, more_follows)
        );
        listed.extend(page.leases.into_iter().map(|(name, _)| name));
        cursor = page.cursor;
    }
    listed.sort();
    assert_eq!(listed, names, "each lease is listed once");
    // A page of size 0 would lead to the same page again, so each page has at least one lease.
    let page = two.list(0, None).await.unwrap();
    assert_eq!((page.leases.len(), page.cursor.is_some()), (1, true));
}

#[tokio::test]
async fn a_page_in_postgres_is_full() {
    a_page_is_full_where_more_follows_and_the_last_one_leads_nowhere::<Postgres>().await;
}

#[tokio::test]
async fn a_page_in_the_process_is_full() {
    a_page_is_full_where_more_follows_and_the_last_one_leads_nowhere::<Memory>().await;
}

/// Postgres accepts no text with this character, so no name contains it.
#[tokio::test]
async fn cursor_with_a_nul_byte_is_invalid() {
    let db = PostgresDatabase::fresh(2).await;
    let leases = PostgresLeases::new(db.fence());
    grant(&leases, &sku(), LONG).await;
    let refused = leases.list(1, Some("after:a\0b")).await;
    assert_matches!(&refused, Err(LeaseError::Invalid { field, .. }) if field == "cursor");
}
