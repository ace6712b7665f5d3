//! A Postgres server that is killed under load, and a standby that takes over. Acknowledged writes
//! and granted leases persist, or are lost together.

use sqlx::{PgPool, Postgres};
use tower_fence::{
    AdmitError, Fence, Resource, Token, TokenUse,
    announce::{Announce, AnnounceError, LeaseDigest},
    lease::{Acquire, Lease, LeaseError, Leases, PostgresLeases, Renew},
};

use super::answered::{Holders, Outcome, entries, fence, outcome, server};
use crate::support::{
    lease::{LONG, grant, keeps_its_token, renew_for},
    postgres::PostgresServer,
    proxy::{Link, Proxy},
    standby::{Replication, Standby, execute, number},
};

/// Kills the primary under load, and continues with the standby. `noticed` is whether failover
/// detection is on.
async fn fail_over(replication: Replication, noticed: bool) -> Outcome {
    let mut primary = server().await;
    let notice = fence(&primary).await.notice_failover(noticed).await;
    notice.unwrap();
    let standby = Standby::of(&primary, replication).await;
    let address = Proxy::to(primary.addr()).await;
    let url = address.url(&primary.url("postgres"));
    outcome(&url, async |holders| {
        if replication == Replication::Asynchronous {
            standby.hold_back();
            holders.go_on().await;
        }
        let held = Resource::new("held").unwrap();
        let lease = grant(&holders.leases, &held, LONG).await;
        primary.crash().await;
        // A request that reaches the standby before its promotion writes nothing.
        address.switch_to(standby.server.addr());
        assert_eq!(holders.try_write(&held, lease.token.get(), 0).await, 503);
        address.set(Link::Cut);
        let promoted = standby.promote().await;
        are_lost_together(&promoted, holders).await;
        match (replication, noticed) {
            (Replication::Synchronous, false) => is_still_held(&promoted, &held, &lease).await,
            (Replication::Synchronous, true) => has_ended(&promoted, &held, &lease).await,
            (Replication::Asynchronous, false) => is_forgotten(&promoted, &held, &lease).await,
            (Replication::Asynchronous, true) => {
                is_forgotten(&promoted, &held, &lease).await;
                has_ended(&promoted, &held, &lease).await;
            }
        }
        address.set(Link::Whole);
        promoted
    })
    .await
}

/// Checks that each write exists together with its `max_token` and its lease, or is lost together
/// with its `max_token`.
async fn are_lost_together(promoted: &PostgresServer, holders: &Holders) {
    let fence = fence(promoted).await;
    let entries = entries(fence.pool()).await;
    let tokens: Vec<(String, i64, i64)> = sqlx::query_as(
        "SELECT f.resource, f.max_token, l.token FROM tower_fence.resources AS f JOIN tower_fence.leases AS l USING (resource)",
    )
    .fetch_all(fence.pool())
    .await
    .unwrap();
    for write in &*holders.acknowledged.lock().unwrap() {
        let is_its = |row: &&(String, i64, i64)| row.0 == write.resource.as_str();
        let &(_, max_token, lease) = tokens.iter().find(is_its).unwrap();
        let is_there = entries.contains_key(&write.entry);
        assert_eq!(is_there, max_token >= write.token, "{}", write.token);
        assert!(lease >= write.token || !is_there, "{}", write.token);
    }
}

/// Checks that no other client gets the lease, and that its holder can renew it and write.
async fn is_still_held(promoted: &PostgresServer, resource: &Resource, lease: &Lease) {
    let fence = fence(promoted).await;
    let leases = PostgresLeases::new(fence.clone());
    let other = leases.acquire(resource, Acquire::new(LONG)).await;
    assert_matches!(other, Err(LeaseError::Held { .. }));
    keeps_its_token(&leases, lease).await;
    write(promoted, resource, lease.token).await.unwrap();
}

/// Checks that the lease has ended. Its holder may have read data that is out of date, so the fence
/// must not admit its token.
async fn has_ended(promoted: &PostgresServer, resource: &Resource, lease: &Lease) {
    let fence = fence(promoted).await;
    is_lost(&fence, resource, lease).await;
    let refused = write(promoted, resource, lease.token).await;
    assert_matches!(refused, Err(AdmitError::Stale(_)));
    let leases = PostgresLeases::new(fence);
    assert!(grant(&leases, resource, LONG).await.token > lease.token);
}

/// Checks that the lease, its token, and the first epoch of its partition are lost.
async fn is_forgotten(promoted: &PostgresServer, resource: &Resource, lease: &Lease) {
    let fence = fence(promoted).await;
    assert_eq!(fence.inspect(resource).await.unwrap(), None);
    let epochs = "SELECT count(*) FROM tower_fence.epochs WHERE partition = tower_fence.partition_of('held')";
    assert_eq!(number(promoted, epochs).await, 0);
    is_lost(&fence, resource, lease).await;
}

async fn is_lost(fence: &Fence<Postgres>, resource: &Resource, lease: &Lease) {
    let leases = PostgresLeases::new(fence.clone());
    let renewed = leases.renew(resource, &lease.id, Renew::new(LONG)).await;
    assert_matches!(renewed, Err(LeaseError::Lost { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn synchronous_standby_has_every_acknowledged_write() {
    for noticed in [true, false] {
        let outcome = fail_over(Replication::Synchronous, noticed).await;
        assert_eq!(outcome, Outcome::default());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn asynchronous_standby_loses_writes_with_their_tokens_and_leases() {
    let outcome = fail_over(Replication::Asynchronous, false).await;
    assert_eq!(outcome.has_lost_enough().doubled, 0);
    assert!(outcome.repeated > 0, "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_lost_by_an_asynchronous_standby_is_superseded() {
    let outcome = fail_over(Replication::Asynchronous, true).await;
    outcome.has_lost_only_writes();
}

/// The second standby has not followed the first promotion, so it takes the same timeline id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_distinguishes_two_promotions_that_look_like_one() {
    let mut primary = server().await;
    let held = Resource::new("held").unwrap();
    let before = grant(&PostgresLeases::new(fence(&primary).await), &held, LONG).await;
    let first = Standby::of(&primary, Replication::Asynchronous).await;
    let second = Standby::of(&primary, Replication::Asynchronous).await;
    primary.crash().await;

    let first = first.promote().await;
    has_ended(&first, &held, &before).await;
    let lost = held_by(&first, &held).await;
    write(&first, &held, lost).await.unwrap();
    drop(first);

    let second = second.promote().await;
    let timeline =
        "SELECT ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint";
    assert_eq!(number(&second, timeline).await, 2);
    has_ended(&second, &held, &before).await;
    let again = held_by(&second, &held).await;
    assert_eq!(again, lost, "the second promotion was detected");
    fence(&second).await.after_failover().await.unwrap();
    let refused = write(&second, &held, lost).await;
    assert_matches!(refused, Err(AdmitError::Stale(_)));
    let leases = PostgresLeases::new(fence(&second).await);
    let after = grant(&leases, &held, LONG).await;
    assert!(after.token > lost);
    write(&second, &held, after.token).await.unwrap();
}

/// A standby may not have replayed a grant yet, so it does not know whether a lease was lost.
#[tokio::test]
async fn standby_does_not_report_a_lease_as_lost() {
    let primary = server().await;
    let held = Resource::new("held").unwrap();
    let leases = PostgresLeases::new(fence(&primary).await);
    let standby = Standby::of(&primary, Replication::Asynchronous).await;
    standby.hold_back();
    let lease = grant(&leases, &held, LONG).await;
    let on_standby = PostgresLeases::new(lazy_fence(&standby.server));
    let renew = on_standby.renew(&held, &lease.id, Renew::new(LONG)).await;
    assert_matches!(renew, Err(LeaseError::Unavailable(_)));
    renew_for(&leases, &lease, LONG).await;
}

fn lazy_fence(server: &PostgresServer) -> Fence<Postgres> {
    Fence::new(PgPool::connect_lazy(&server.url("postgres")).unwrap())
}

/// Without failover detection, the timeline that the fence records does not distinguish a standby.
#[tokio::test]
async fn standby_confirms_no_renewal_even_without_failover_detection() {
    let primary = server().await;
    let undetected = "CREATE OR REPLACE FUNCTION tower_fence.current_history() RETURNS text \
         LANGUAGE sql AS 'SELECT pg_catalog.text '''''";
    execute(&primary, undetected).await;
    let held = Resource::new("held").unwrap();
    let (token, lease) = (Token::new(5).unwrap(), LeaseDigest::of("a"));
    let on_primary = fence(&primary).await;
    let grant = on_primary.announce(&held, token, &lease, false);
    grant.await.unwrap();
    let standby = Standby::of(&primary, Replication::Asynchronous).await;
    let on_standby = lazy_fence(&standby.server);
    let renewal = on_standby.announce(&held, token, &lease, true).await;
    assert_matches!(renewal, Err(AnnounceError::Unreachable(_)));
    let renewal = on_primary.announce(&held, token, &lease, true);
    renewal.await.unwrap();
}

/// Returns the token of the current holder.
async fn held_by(server: &PostgresServer, resource: &Resource) -> Token {
    let leases = PostgresLeases::new(fence(server).await);
    leases.inspect(resource).await.unwrap().unwrap().token
}

async fn write(
    server: &PostgresServer,
    resource: &Resource,
    token: Token,
) -> Result<(), AdmitError> {
    let fence = fence(server).await;
    let tx = fence.begin(resource, token, TokenUse::SingleUse).await?;
    tx.commit().await.unwrap();
    Ok(())
}
