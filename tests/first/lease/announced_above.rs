//! Announced grants of a resource whose fence has admitted a token above the grant.

use sqlx::Sqlite;
use tower_fence::{
    Resource, Token,
    announce::{Announce, AnnounceError, LeaseDigest},
    client::{AcquireError, Holder, HttpLeases},
    lease::{Acquire, Announced, LeaseError, Leases, MemoryLeases, Renew},
};

use crate::support::{
    announced::{
        a_forged_token_concerns_its_resource_alone, a_lease_whose_token_is_the_last_has_no_other,
        forged,
    },
    database::TestDatabase,
    eventually,
    fence::use_up,
    http::{Answer, Server},
    lease::{LONG, grant, sku},
    redis::{connect_shared, fresh_prefix},
    store::{self, TestStore},
};

#[tokio::test]
async fn forged_token_affects_only_its_resource_in_memory() {
    let db = Sqlite::fresh(2).await;
    a_forged_token_concerns_its_resource_alone(MemoryLeases::new(db.fence()), db).await;
}

#[tokio::test]
async fn forged_token_affects_only_its_resource_on_redis() {
    let db = Sqlite::fresh(2).await;
    let store = connect_shared(db.fence(), &fresh_prefix()).await;
    a_forged_token_concerns_its_resource_alone(store, db).await;
}

#[tokio::test]
async fn lease_with_the_last_token_gets_no_other_in_redis() {
    let db = Sqlite::fresh(2).await;
    let store = connect_shared(db.fence(), &fresh_prefix()).await;
    let leases = store.announced_to(db.fence());
    a_lease_whose_token_is_the_last_has_no_other(&leases, &db.fence()).await;
}

/// The leases are in one database, and the protected resources in another.
#[tokio::test]
async fn lease_with_the_last_token_gets_no_other_in_postgres() {
    let (store, _, _leases) = store::Postgres::fresh().await;
    let db = Sqlite::fresh(2).await;
    let leases = Announced::new(store, db.fence());
    a_lease_whose_token_is_the_last_has_no_other(&leases, &db.fence()).await;
}

#[tokio::test]
async fn issuer_reports_that_no_token_is_left() {
    let db = Sqlite::fresh(2).await;
    let leases = MemoryLeases::new(db.fence()).announced_to(db.fence());
    a_lease_whose_token_is_the_last_has_no_other(&leases, &db.fence()).await;
    let server = Server::issuer(leases.clone()).await;
    let answer = Answer::to(server.post("/locks/sku-1")).await;
    let problem = answer.is_problem(409, "fence-exhausted");
    assert_eq!(problem["resource"], "sku-1");
    assert_eq!(problem["max_token"], Token::MAX.get());
    assert!(!answer.headers.contains_key("retry-after"));
    let http = HttpLeases::new(&server.url("/locks")).unwrap();
    let refused = http.acquire(&sku(), Acquire::new(10 * LONG)).await;
    assert_matches!(
        &refused,
        Err(LeaseError::Exhausted { max_token, .. }) if *max_token == Token::MAX.get()
    );
    let is_free = async || leases.inspect(&sku()).await.unwrap().is_none();
    eventually("the client releases the lease", is_free).await;
    let holder = Holder::new(leases.clone()).ttl(10 * LONG);
    let refused = holder.acquire("sku-1").await;
    assert_matches!(
        refused,
        Err(AcquireError::Lease(LeaseError::Exhausted { .. }))
    );
    eventually("the holder releases the lease", is_free).await;
}

#[tokio::test]
async fn a_foreign_token_without_a_next_one_supersedes_a_renewal() {
    let db = Sqlite::fresh(2).await;
    let fence = db.fence();
    let leases = MemoryLeases::new(db.fence()).announced_to(db.fence());
    let lease = grant(&leases, &sku(), LONG).await;
    use_up(&fence, &sku(), Token::MAX).await.unwrap();
    for _ in 0..2 {
        let renewal = Renew::new(LONG).with_new_token();
        let refused = leases.renew(&sku(), &lease.id, renewal).await;
        assert_matches!(refused, Err(LeaseError::Lost { .. }));
        fence.reset(&sku(), lease.token).await.unwrap();
    }
}

/// The fence has received an announcement of the highest possible token, and the token was used.
#[tokio::test]
async fn renewal_keeps_the_last_token_only_of_its_own_lease() {
    let db = Sqlite::fresh(2).await;
    let (fence, store) = (db.fence(), MemoryLeases::new(db.fence()));
    let leases = store.clone().announced_to(db.fence());
    for (name, is_own) in [("sku-1", true), ("sku-2", false)] {
        let resource = Resource::new(name).unwrap();
        let lease = grant(&store, &resource, LONG).await;
        let last = Renew::new(LONG).at_least(Token::MAX);
        store.renew(&resource, &lease.id, last).await.unwrap();
        let announced = LeaseDigest::of(if is_own { lease.id.expose() } else { "another" });
        let announced = fence.announce(&resource, Token::MAX, &announced, false);
        announced.await.unwrap();
        use_up(&fence, &resource, Token::MAX).await.unwrap();
        let renewed = leases.renew(&resource, &lease.id, Renew::new(LONG)).await;
        match is_own {
            true => assert_eq!(renewed.unwrap().token, Token::MAX),
            false => assert_matches!(renewed, Err(LeaseError::Lost { .. })),
        }
    }
}

#[tokio::test]
async fn remote_issuer_takes_no_request_for_a_higher_token() {
    let db = Sqlite::fresh(2).await;
    let store = MemoryLeases::new(db.fence());
    let server = Server::issuer(store.clone()).await;
    let http = HttpLeases::new(&server.url("/locks")).unwrap();
    let leases = http.announced_to(db.fence());
    db.fence().raise(&sku(), forged()).await.unwrap();
    let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
    let Err(LeaseError::Unavailable(cause)) = refused else {
        panic!("{refused:?}");
    };
    let superseded = cause.downcast_ref::<AnnounceError>();
    assert!(
        matches!(superseded, Some(AnnounceError::Superseded { max_token, .. }) if *max_token == forged().get() - 1),
        "{cause:?}"
    );
    assert!(store.inspect(&sku()).await.unwrap().is_none());
}
