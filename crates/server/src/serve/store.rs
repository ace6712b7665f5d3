//! Which store has the leases, and the routes over it.

use axum::Router;
use sqlx::Postgres;
use tower_fence::{
    Fence, TokenKeys,
    console::Console,
    issuer::Issuer,
    lease::{Backend, Driver, LeaseAdmin, RedisLeases},
};

use super::{
    access::Access,
    args::{LeaseArgs, ServeArgs},
    describe::describe,
    health::Health,
    probe,
    redis::RedisMode,
};
use crate::{
    failure::Failure,
    secrets::{addresses, words},
};

/// The issuer over its store.
pub struct Mounted {
    pub locks: Router,
    pub console: Router,
    pub health: Health,
    /// Where the leases are, for people.
    pub place: String,
}

/// The issuer over the store that the arguments name. Nothing is asked of it yet: it need not be up.
pub fn mount(
    args: &ServeArgs,
    fence: Fence<Postgres>,
    keys: Option<TokenKeys>,
    access: &Access,
) -> Result<Mounted, Failure> {
    let settings = Settings {
        leases: &args.leases,
        fence: fence.clone(),
        keys,
        access,
    };
    let schema = args.database.schema.database_schema.as_deref();
    settings.check()?;
    let redis = &args.redis;
    let redis_urls = redis.urls()?;
    let epochs = || probe::epochs(fence.clone(), schema, args.leases.announce);
    if let Some(urls) = args.etcd.urls()? {
        if redis_urls.is_some() {
            return Err(Failure::configuration(
                "both Redis and etcd are configured: the leases are in one of them",
            ));
        }
        let leases = args.etcd.connect_lazy(fence.clone(), &urls)?;
        let health = Health::new(epochs(), probe::reads(leases.clone()));
        let place = format!("etcd at {}", addresses(urls.into_iter()));
        return Ok(settings.mount_outside(leases, health, place));
    }
    let Some(urls) = redis_urls else {
        if redis.redis_mode != RedisMode::Single {
            let text = "a mode of Redis is named, and no Redis: set TOWER_FENCE_REDIS_URL";
            return Err(Failure::configuration(text));
        }
        if args.database.transaction_pooling && args.database.listen()?.is_none() {
            tracing::warn!(
                "without --listen-url, waiters poll four times a second and are not served in their order"
            );
        }
        let leases = args.database.leases(fence.clone())?;
        let grants = probe::grants(fence.clone(), leases.clone(), schema);
        let health = Health::new(probe::answers(fence), grants);
        return Ok(settings.mount(leases, health, "in the database".into()));
    };
    redis.check()?;
    let mode = redis.redis_mode;
    let urls: Vec<&str> = words(urls.expose()).collect();
    let place = format!("Redis ({mode:?}) at {}", addresses(urls.iter().copied())).to_lowercase();
    if mode == RedisMode::Quorum {
        let leases = redis.quorum(fence.clone(), &urls)?;
        let health = Health::new(epochs(), probe::reads(leases.clone()));
        return Ok(settings.mount_outside(leases, health, place));
    }
    let leases = redis.connect_lazy(RedisLeases::builder(fence.clone()), &urls)?;
    let health = Health::new(epochs(), probe::redis(leases.clone()));
    Ok(settings.mount_outside(leases, health, place))
}

struct Settings<'a> {
    leases: &'a LeaseArgs,
    fence: Fence<Postgres>,
    keys: Option<TokenKeys>,
    access: &'a Access,
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
                "the time of a lease, --ttl, is from --min-ttl, which is above 0, to --max-ttl",
            ));
        }
        Ok(())
    }

    /// Mounts a store outside of the database.
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
        let console = Console::new(self.fence.clone(), leases.clone());
        let issuer = Issuer::new(leases)
            .ttl(self.leases.ttl)
            .ttl_limits(self.leases.min_ttl..=self.leases.max_ttl)
            .wait_limit(self.leases.max_wait);
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
