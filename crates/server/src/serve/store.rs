//! The configured lease store, and the routes over it.

use axum::Router;
use sqlx::Postgres;
use tower_fence::{
    Fence, TokenKeys,
    issuer::Issuer,
    lease::{Backend, Driver, LeaseAdmin, RedisLeases},
};

use tower_fence_console::{Console, Events};

use super::{
    access::Access,
    args::{LeaseArgs, ServeArgs},
    describe::describe,
    health::Health,
    probe,
    redis::RedisMode,
    stop::Stop,
};
use crate::{
    failure::Failure,
    secrets::{addresses, words},
};

/// The issuer and the console over the lease store.
pub struct Mounted {
    pub locks: Router,
    pub console: Router,
    pub health: Health,
    /// The location of the leases, for messages.
    pub place: String,
}

/// Mounts the issuer over the configured store. Does not connect to the store, which need not be
/// running yet.
pub fn mount(
    args: &ServeArgs,
    fence: Fence<Postgres>,
    keys: Option<TokenKeys>,
    access: &Access,
    events: Events,
    stop: Stop,
) -> Result<Mounted, Failure> {
    let settings = Settings {
        leases: &args.leases,
        fence: fence.clone(),
        keys,
        access,
        events,
        stop,
    };
    let schema = args.database.schema.database_schema.as_deref();
    settings.check()?;
    let redis = &args.redis;
    let redis_urls = redis.urls()?;
    // The server refuses requests above `max_waiting` itself. The store also counts the positions
    // that it keeps for clients that may retry, so its limit must be higher.
    let max_waiters = 2 * args.limits.max_waiting as usize;
    let epochs = || probe::epochs(fence.clone(), schema, args.leases.announce);
    if let Some(urls) = args.etcd.urls()? {
        if redis_urls.is_some() {
            return Err(Failure::configuration(
                "both Redis and etcd are configured: choose one of them",
            ));
        }
        let leases = args.etcd.connect_lazy(fence.clone(), &urls)?;
        let leases = leases.max_waiters(max_waiters);
        let health = Health::new(epochs(), probe::reads(leases.clone()));
        let place = format!("etcd at {}", addresses(urls.into_iter()));
        return Ok(settings.mount_outside(leases, health, place));
    }
    let Some(urls) = redis_urls else {
        if args.database.transaction_pooling && args.database.listen()?.is_none() {
            tracing::warn!(
                "without --listen-url, waiters poll four times a second and are not served in order"
            );
        }
        let leases = args.database.leases(fence.clone())?;
        let leases = leases.max_waiters(max_waiters);
        let grants = probe::grants(fence.clone(), leases.clone(), schema);
        let health = Health::new(probe::answers(fence), grants);
        return Ok(settings.mount(leases, health, "the database".into()));
    };
    redis.check()?;
    let mode = redis.redis_mode;
    let urls: Vec<&str> = words(urls.expose()).collect();
    let place = format!("Redis ({mode:?}) at {}", addresses(urls.iter().copied())).to_lowercase();
    if mode == RedisMode::Quorum {
        let leases = redis.quorum(fence.clone(), &urls)?;
        let leases = leases.max_waiters(max_waiters);
        let health = Health::new(epochs(), probe::reads(leases.clone()));
        return Ok(settings.mount_outside(leases, health, place));
    }
    let leases = redis.connect_lazy(RedisLeases::builder(fence.clone()), &urls)?;
    let leases = leases.max_waiters(max_waiters);
    let health = Health::new(epochs(), probe::redis(leases.clone()));
    Ok(settings.mount_outside(leases, health, place))
}

struct Settings<'a> {
    leases: &'a LeaseArgs,
    fence: Fence<Postgres>,
    keys: Option<TokenKeys>,
    access: &'a Access,
    events: Events,
    stop: Stop,
}

impl Settings<'_> {
    fn check(&self) -> Result<(), Failure> {
        let LeaseArgs {
            ttl,
            min_ttl,
            max_ttl,
            ..
        } = self.leases;
        if !(min_ttl..=max_ttl).contains(&ttl) || min_ttl.is_zero() {
            return Err(Failure::configuration(
                "--ttl must be from --min-ttl to --max-ttl, and --min-ttl must be above 0",
            ));
        }
        Ok(())
    }

    /// Mounts a store other than the database.
    fn mount_outside<B: Backend>(
        &self,
        leases: Driver<B>,
        health: Health,
        place: String,
    ) -> Mounted {
        match self.leases.announce {
            true => self.mount(leases.announced_to(self.fence.clone()), health, place),
            false => self.mount(leases, health, place),
        }
    }

    fn mount<L: LeaseAdmin + Clone>(&self, leases: L, health: Health, place: String) -> Mounted {
        let console = Console::new(self.fence.clone(), leases.clone(), self.events.clone());
        let issuer = Issuer::new(leases)
            .ttl(self.leases.ttl)
            .ttl_limits(self.leases.min_ttl..=self.leases.max_ttl)
            .wait_limit(self.leases.max_wait)
            .close_on(self.stop.clone().queue_over());
        let mut document = issuer.operator_openapi();
        describe(&mut document, self.access);
        let issuer = issuer.serve_openapi(document);
        let locks = match &self.keys {
            Some(keys) => issuer.sign_with(keys.clone()).operator_router(),
            None => issuer.operator_router(),
        };
        Mounted {
            locks,
            console: console.router(),
            health,
            place,
        }
    }
}
