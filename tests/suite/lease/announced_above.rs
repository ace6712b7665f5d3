//! Announced grants of a resource whose fence has seen a token above the grant.

use axum::Router;
use sqlx::Sqlite;
use tower_fence::{
    AdmitError, Fence, Resource, Token, TokenUse,
    announce::AnnounceError,
    client::HttpLeases,
    issuer,
    lease::{
        Acquire, Announced, EmbeddedLeases, EtcdLeases, LeaseError, Leases, RedisLeases, Renew,
    },
};

use crate::support::{
    database::{Fresh, TestDatabase},
    etcd::{self, EtcdCluster},
    http::{Answer, Server},
    lease::{LONG, grant, highest_epoch, sku},
    redis::{fresh_prefix, shared_url},
    store::{self, Quorum, TestStore},
};

/// Of the partition of `sku-1`.
const NEIGHBOUR: &str = "sku-124";

/// What somebody without any rights can have sent.
pub fn forged() -> Token {
    Token::new(999_999_999_000_000).unwrap()
}

async fn a_forged_token_concerns_its_resource_alone(store: impl Leases + Clone, db: Fresh<Sqlite>) {
    let fence = db.fence();
    let leases = Announced::new(store.clone(), fence.clone());
    let neighbour = Resource::new(NEIGHBOUR).unwrap();
    let before = grant(&leases, &neighbour, LONG).await;
    leases.release(&neighbour, &before.id).await.unwrap();
    let tx = fence.begin(&sku(), forged(), TokenUse::SingleUse).await;
    tx.unwrap().commit().await.unwrap();

    let lease = grant(&leases, &sku(), LONG).await;
    assert_eq!(lease.token.get(), forged().get() + 1);
    // Renewed as any other, with and without a new token.
    let plain = leases.renew(&sku(), &lease.id, Renew::new(LONG)).await;
    assert_eq!(plain.unwrap().token, lease.token);
    let anew = Renew::new(LONG).with_new_token();
    let anew = leases.renew(&sku(), &lease.id, anew).await.unwrap();
    assert!(anew.token > lease.token);
    let tx = fence.begin(&sku(), anew.token, TokenUse::SingleUse).await;
    tx.unwrap().commit().await.unwrap();
    leases.release(&sku(), &lease.id).await.unwrap();
    let next = grant(&leases, &sku(), LONG).await;
    assert!(next.token > anew.token);
    let refused = fence.begin(&sku(), anew.token, TokenUse::SingleUse).await;
    assert!(matches!(refused, Err(AdmitError::Stale(_))));
    let tx = fence.begin(&sku(), next.token, TokenUse::SingleUse).await;
    tx.unwrap().commit().await.unwrap();
    leases.release(&sku(), &next.id).await.unwrap();

    // No epoch was taken for it, and the others of the partition count on as before.
    let after = grant(&leases, &neighbour, LONG).await;
    assert!(after.token > before.token && after.token.get() < before.token.get() + 20);
    assert_eq!(highest_epoch(&db).await, 1);

    // The end of the range is the end of the resource, until its fence is taken back.
    let tx = fence.begin(&sku(), Token::MAX, TokenUse::SingleUse).await;
    tx.unwrap().commit().await.unwrap();
    let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
    let Err(LeaseError::Exhausted {
        resource,
        max_token,
    }) = refused
    else {
        panic!("{refused:?}");
    };
    assert_eq!((resource, max_token), (sku(), Token::MAX.get()));
    assert!(store.inspect(&sku()).await.unwrap().is_none());
}

#[tokio::test]
async fn a_forged_token_concerns_its_resource_alone_embedded() {
    let db = Sqlite::fresh(2).await;
    a_forged_token_concerns_its_resource_alone(EmbeddedLeases::new(db.fence()), db).await;
}

#[tokio::test]
async fn a_forged_token_concerns_its_resource_alone_on_redis() {
    let db = Sqlite::fresh(2).await;
    let builder = RedisLeases::builder(db.fence()).key_prefix(fresh_prefix());
    let store = builder.connect(&shared_url()).await.unwrap();
    a_forged_token_concerns_its_resource_alone(store, db).await;
}

#[tokio::test]
async fn a_forged_token_concerns_its_resource_alone_on_a_quorum() {
    let (store, _, db) = Quorum::of(Sqlite::fresh(2).await).await;
    a_forged_token_concerns_its_resource_alone(store, db).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forged_token_concerns_its_resource_alone_on_etcd() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let store = EtcdLeases::connect(&cluster.urls(), db.fence()).await;
    a_forged_token_concerns_its_resource_alone(store.unwrap(), db).await;
}

/// Takes the lease, which may be used and released, and has no other token.
async fn a_lease_whose_token_is_the_last_has_no_other(leases: &impl Leases, fence: &Fence<Sqlite>) {
    fence.raise(&sku(), Token::MAX).await.unwrap();
    let last = grant(leases, &sku(), LONG).await;
    assert_eq!(last.token, Token::MAX);
    let anew = Renew::new(LONG).with_new_token();
    let refused = leases.renew(&sku(), &last.id, anew).await;
    assert!(
        matches!(refused, Err(LeaseError::Exhausted { .. })),
        "{refused:?}"
    );
    // It may still be used.
    let tx = fence.begin(&sku(), last.token, TokenUse::SingleUse).await;
    tx.unwrap().commit().await.unwrap();
    leases.release(&sku(), &last.id).await.unwrap();
}

#[tokio::test]
async fn a_lease_whose_token_is_the_last_has_no_other_in_redis() {
    let db = Sqlite::fresh(2).await;
    let builder = RedisLeases::builder(db.fence()).key_prefix(fresh_prefix());
    let store = builder.connect(&shared_url()).await.unwrap();
    let leases = store.announced_to(db.fence());
    a_lease_whose_token_is_the_last_has_no_other(&leases, &db.fence()).await;
}

#[tokio::test]
async fn a_lease_whose_token_is_the_last_has_no_other_on_a_quorum() {
    let (store, _, db) = Quorum::of(Sqlite::fresh(2).await).await;
    let leases = store.announced_to(db.fence());
    a_lease_whose_token_is_the_last_has_no_other(&leases, &db.fence()).await;
}

#[tokio::test]
async fn a_lease_whose_token_is_the_last_has_no_other_in_etcd() {
    let db = Sqlite::fresh(2).await;
    let builder = EtcdLeases::builder(db.fence()).key_prefix(fresh_prefix());
    let store = builder.connect(&[etcd::shared_url()]).await.unwrap();
    let leases = store.announced_to(db.fence());
    a_lease_whose_token_is_the_last_has_no_other(&leases, &db.fence()).await;
}

/// The leases are in one database, and what they protect in another.
#[tokio::test]
async fn a_lease_whose_token_is_the_last_has_no_other_in_postgres() {
    let (store, _, _leases) = store::Postgres::fresh().await;
    let db = Sqlite::fresh(2).await;
    let leases = Announced::new(store, db.fence());
    a_lease_whose_token_is_the_last_has_no_other(&leases, &db.fence()).await;
}

#[tokio::test]
async fn where_no_token_is_left_the_issuer_says_so() {
    let db = Sqlite::fresh(2).await;
    let leases = EmbeddedLeases::new(db.fence()).announced_to(db.fence());
    a_lease_whose_token_is_the_last_has_no_other(&leases, &db.fence()).await;
    let server = Server::start(Router::new().nest("/locks", issuer::router(leases))).await;
    let answer = Answer::to(server.post("/locks/sku-1")).await;
    let problem = answer.is_problem(409, "fence-exhausted");
    assert_eq!(problem["resource"], "sku-1");
    assert_eq!(problem["max_token"], Token::MAX.get());
    assert!(!answer.headers.contains_key("retry-after"));
    let http = HttpLeases::new(&server.url("/locks")).unwrap();
    let refused = http.acquire(&sku(), Acquire::new(LONG)).await;
    assert!(
        matches!(&refused, Err(LeaseError::Exhausted { max_token, .. }) if *max_token == Token::MAX.get()),
        "{refused:?}"
    );
}

#[tokio::test]
async fn an_issuer_elsewhere_cannot_be_asked_for_a_higher_token() {
    let db = Sqlite::fresh(2).await;
    let store = EmbeddedLeases::new(db.fence());
    let server = Server::start(Router::new().nest("/locks", issuer::router(store.clone()))).await;
    let http = HttpLeases::new(&server.url("/locks")).unwrap();
    let leases = http.announced_to(db.fence());
    db.fence().raise(&sku(), forged()).await.unwrap();
    let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
    let Err(LeaseError::Unavailable(cause)) = refused else {
        panic!("{refused:?}");
    };
    let outranked = cause.downcast_ref::<AnnounceError>();
    assert!(
        matches!(outranked, Some(AnnounceError::Outranked { next, .. }) if *next == forged()),
        "{cause:?}"
    );
    assert!(store.inspect(&sku()).await.unwrap().is_none());
}
