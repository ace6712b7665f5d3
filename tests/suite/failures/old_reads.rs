//! Holders that write from a read that is out of date: read before a failover that has forgotten that the newer
//! one's grant had raised the fence, or read from a standby.

use sqlx::{PgPool, Postgres};
use tower_fence::{
    AdmitError, Fence, Resource, TokenUse,
    lease::{Acquire, Lease, Leases, PostgresLeases, RedisLeases},
};

use crate::support::{
    eventually,
    lease::SHORT,
    postgres::PostgresServer,
    proxy::Proxy,
    redis::{fresh_prefix, shared_url},
    standby::{Replication, Standby, execute, number},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cure {
    Nothing,
    /// An operator calls it.
    AfterFailover,
    /// The fence sees the other time line.
    Notice,
}

/// Where the leases are; of a resource of the same name.
const STORES: [&str; 2] = ["postgres", "redis"];

struct Stores {
    postgres: PostgresLeases,
    redis: RedisLeases,
    fence: Fence<Postgres>,
}

impl Stores {
    async fn of(fence: Fence<Postgres>) -> Self {
        let builder = RedisLeases::builder(fence.clone()).key_prefix(fresh_prefix());
        Self {
            postgres: PostgresLeases::new(fence.clone()),
            redis: builder.connect(&shared_url()).await.unwrap(),
            fence,
        }
    }

    /// Acquires for a moment, and reads.
    async fn holder(&self, store: &'static str, reads_from: &PostgresServer) -> Holder {
        let resource = Resource::new(store).unwrap();
        let lease = match store {
            "postgres" => acquire(&self.postgres, &resource).await,
            _ => {
                let announced = self.redis.clone().announced_to(self.fence.clone());
                acquire(&announced, &resource).await
            }
        };
        let read = read(store, reads_from).await;
        Holder {
            lease,
            resource,
            read,
        }
    }
}

/// Acquires as soon as the lease is free.
async fn acquire(leases: &impl Leases, resource: &Resource) -> Lease {
    let mut lease = None;
    eventually("the lease is free", async || {
        lease = leases.acquire(resource, Acquire::new(SHORT)).await.ok();
        lease.is_some()
    })
    .await;
    lease.unwrap()
}

async fn read(store: &str, server: &PostgresServer) -> i64 {
    number(
        server,
        &format!("SELECT n FROM stock WHERE store = '{store}'"),
    )
    .await
}

struct Holder {
    lease: Lease,
    resource: Resource,
    read: i64,
}

impl Holder {
    /// Adds one to what it has read; whether that was acknowledged.
    async fn write(&self, fence: &Fence<Postgres>) -> bool {
        let admitted = fence.begin(&self.resource, self.lease.token, TokenUse::SingleUse);
        let mut tx = match admitted.await {
            Ok(tx) => tx,
            Err(AdmitError::Stale(_)) => return false,
            Err(error) => panic!("{error:?}"),
        };
        sqlx::query("UPDATE stock SET n = $1 WHERE store = $2")
            .bind(self.read + 1)
            .bind(self.resource.as_str())
            .execute(&mut *tx)
            .await
            .unwrap();
        tx.commit().await.unwrap();
        true
    }
}

async fn server() -> PostgresServer {
    let server = PostgresServer::start(&[]).await;
    let stock = "CREATE TABLE stock (store TEXT, n BIGINT); \
                 INSERT INTO stock VALUES ('postgres', 0), ('redis', 0)";
    execute(&server, stock).await;
    server
}

/// In each store: whether the older holder's write was acknowledged, whether the newer one's, and how many of
/// the acknowledged ones are lost.
async fn fail_over(cure: Cure) -> [(bool, bool, i64); 2] {
    let mut primary = server().await;
    let address = Proxy::to(primary.addr()).await;
    let url = address.url(&primary.url("postgres"));
    let fence = || async { Fence::new(PgPool::connect(&url).await.unwrap()) };
    let before = fence().await;
    before.migrate().await.unwrap();
    before.notice_failover(cure == Cure::Notice).await.unwrap();
    let stores = Stores::of(before).await;
    let standby = Standby::of(&primary, Replication::Asynchronous).await;

    // The older ones read, and pause for longer than their leases.
    let mut holders = vec![];
    for store in STORES {
        holders.push(stores.holder(store, &primary).await);
    }
    standby.catch_up(&primary).await;
    standby.hold_back();
    // The grants of the newer ones make their tokens dead, and that is lost.
    for store in STORES {
        holders.push(stores.holder(store, &primary).await);
    }
    primary.crash().await;
    let promoted = standby.promote().await;
    address.switch_to(promoted.addr());

    // In another process than that which has granted.
    let fence = fence().await;
    if cure == Cure::AfterFailover {
        fence.after_failover().await.unwrap();
    }
    let mut outcomes = [(false, false, 0); 2];
    for (n, store) in STORES.into_iter().enumerate() {
        let [older, newer] = [&holders[n], &holders[2 + n]];
        let (older_wrote, newer_wrote) = (older.write(&fence).await, newer.write(&fence).await);
        let acknowledged = i64::from(older_wrote) + i64::from(newer_wrote);
        let lost = acknowledged - read(store, &promoted).await;
        outcomes[n] = (older_wrote, newer_wrote, lost);
        // Whoever acquires and reads anew, writes.
        let next = stores.holder(store, &promoted).await;
        assert!(next.lease.token > newer.lease.token);
        assert!(next.write(&fence).await, "{cure:?} {store}");
    }
    outcomes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_that_nobody_notices_loses_a_write_that_was_acknowledged_after_it() {
    assert_eq!(fail_over(Cure::Nothing).await, [(true, true, 1); 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_failover_that_is_noticed_nobody_writes_from_an_old_read() {
    for cure in [Cure::Notice, Cure::AfterFailover] {
        assert_eq!(fail_over(cure).await, [(false, false, 0); 2], "{cure:?}");
    }
}

/// A synchronous standby has what was acknowledged, and need not show it yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_read_under_an_announced_grant_sees_all_on_the_primary_and_not_on_a_standby() {
    let primary = server().await;
    let fence = Fence::new(PgPool::connect(&primary.url("postgres")).await.unwrap());
    fence.migrate().await.unwrap();
    let stores = Stores::of(fence.clone()).await;
    let standby = Standby::of(&primary, Replication::Synchronous).await;
    execute(&standby.server, "SELECT pg_wal_replay_pause()").await;
    for store in STORES {
        assert!(stores.holder(store, &primary).await.write(&fence).await);
        let next = stores.holder(store, &primary).await;
        assert_eq!(next.read, 1);
        let misled = stores.holder(store, &standby.server).await;
        assert_eq!(misled.read, 0);
        assert!(misled.write(&fence).await);
        assert_eq!(
            read(store, &primary).await,
            1,
            "two writes were acknowledged"
        );
    }
}
