//! Leases in Redis, whose epochs are in a Postgres that fails over and has lost the last of them: what a loss of
//! the one, of the other and of both does to tokens.

use sqlx::{PgPool, Postgres};
use tower_fence::{
    AdmitError, Fence, Resource, Token, TokenUse,
    lease::{Leases, RedisLeases},
};

use crate::support::{
    lease::{LONG, grant},
    postgres::PostgresServer,
    proxy::Proxy,
    redis::RedisServer,
    standby::{Replication, Standby, number},
};

/// A Redis, and a resource in a partition of its own.
struct Site {
    redis: RedisServer,
    resource: Resource,
    /// The last token that was granted.
    last: Token,
}

impl Site {
    /// Of which the standby knows the first epoch.
    async fn new(name: &str, fence: &Fence<Postgres>) -> Self {
        let redis = RedisServer::start(&[]).await;
        let mut site = Self {
            redis,
            resource: Resource::new(name).unwrap(),
            last: Token::MIN,
        };
        site.grants_above(fence).await;
        site
    }

    /// Whose grants are not announced: the fence can correct none of them.
    async fn issuer(&self, fence: &Fence<Postgres>) -> RedisLeases {
        let url = self.redis.url();
        RedisLeases::connect(&url, fence.clone()).await.unwrap()
    }

    async fn lose_all(&mut self) {
        self.redis.kill();
        self.redis.start_again().await;
    }

    /// An issuer that has just started grants; whether above all that was granted before.
    async fn grants_above(&mut self, fence: &Fence<Postgres>) -> bool {
        let issuer = self.issuer(fence).await;
        self.grants_above_by(&issuer).await
    }

    async fn grants_above_by(&mut self, issuer: &RedisLeases) -> bool {
        let lease = grant(issuer, &self.resource, LONG).await;
        issuer.release(&self.resource, &lease.id).await.unwrap();
        let is_above = lease.token > self.last;
        self.last = self.last.max(lease.token);
        is_above
    }

    async fn is_dead(&self, fence: &Fence<Postgres>, token: Token) -> bool {
        match fence
            .begin(&self.resource, token, TokenUse::SingleUse)
            .await
        {
            Err(AdmitError::Stale(_)) => true,
            Err(error) => panic!("{error:?}"),
            Ok(_) => false,
        }
    }
}

/// What was lost beside the last epoch of the database, and whether the grants after it were above those
/// before it.
#[derive(Debug, PartialEq, Eq)]
struct Above {
    nothing: bool,
    redis_later: bool,
    redis_at_once: bool,
    redis_and_issuers_at_once: bool,
}

async fn fail_over(noticed: bool) -> Above {
    let mut primary = PostgresServer::start(&[]).await;
    let address = Proxy::to(primary.addr()).await;
    let url = address.url(&primary.url("postgres"));
    let fence = Fence::new(PgPool::connect(&url).await.unwrap());
    fence.migrate().await.unwrap();
    fence.notice_failover(noticed).await.unwrap();
    let mut sites = vec![];
    for name in ["nothing", "later", "at-once", "all", "redis"] {
        sites.push(Site::new(name, &fence).await);
    }
    let partitions = "SELECT count(DISTINCT partition) FROM fence_epochs";
    assert_eq!(number(&primary, partitions).await, 5);
    let standby = Standby::of(&primary, Replication::Asynchronous).await;
    standby.hold_back();
    let [nothing, later, at_once, all, redis] = &mut sites[..] else {
        unreachable!()
    };
    // The second epoch of each is in the part that is lost; but not of the last one.
    for site in [&mut *nothing, later, at_once, all] {
        site.lose_all().await;
        assert!(site.grants_above(&fence).await);
    }
    let survivor = at_once.issuer(&fence).await;
    at_once.grants_above_by(&survivor).await;
    let before: Vec<Token> = [&*nothing, later, at_once, all, redis]
        .map(|site| site.last)
        .into();
    primary.crash().await;
    let promoted = standby.promote().await;
    address.switch_to(promoted.addr());
    let fence = Fence::new(PgPool::connect(&url).await.unwrap());

    // Redis alone.
    redis.lose_all().await;
    assert!(redis.grants_above(&fence).await);
    at_once.lose_all().await;
    all.lose_all().await;
    let above = Above {
        nothing: nothing.grants_above(&fence).await,
        redis_later: {
            // The issuer tells the database of the epoch that it has forgotten.
            let above = later.grants_above(&fence).await;
            later.lose_all().await;
            above && later.grants_above(&fence).await
        },
        redis_at_once: at_once.grants_above_by(&survivor).await,
        redis_and_issuers_at_once: all.grants_above(&fence).await,
    };
    if noticed {
        for (site, token) in sites.iter().zip(before) {
            assert!(site.is_dead(&fence, token).await, "{}", site.resource);
            assert!(!site.is_dead(&fence, site.last).await, "{}", site.resource);
        }
    }
    above
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_of_the_database_that_is_noticed_is_outranked_whatever_redis_loses() {
    let all = Above {
        nothing: true,
        redis_later: true,
        redis_at_once: true,
        redis_and_issuers_at_once: true,
    };
    assert_eq!(fail_over(true).await, all);
}

/// Only what nobody remembers comes again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_is_not_noticed_repeats_tokens_where_redis_and_issuers_are_lost_with_it() {
    let but_all_at_once = Above {
        nothing: true,
        redis_later: true,
        redis_at_once: true,
        redis_and_issuers_at_once: false,
    };
    assert_eq!(fail_over(false).await, but_all_at_once);
}
