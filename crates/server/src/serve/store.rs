//! The configured lease store, and the routes over it.

use axum::Router;
use sqlx::Postgres;
use tower_fence::{
    Fence, TokenKeys,
    issuer::Issuer,
    lease::{Backend, BoxLeases, Driver, RedisLeases},
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
    secrets::{addresses, split_urls},
};

/// The issuer and the console over the lease store.
pub struct Mounted {
    pub locks: Router,
    pub console: Router,
    pub health: Health,
    /// The location of the leases, for messages.
    pub place: String,
    pub is_in_etcd: bool,
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
    check_ttls(&args.leases)?;
    let redis = &args.redis;
    let (redis_urls, etcd_urls) = (redis.urls()?, args.etcd.urls()?);
    let is_in_etcd = etcd_urls.is_some();
    let schema = args.database.schema.name();
    let announce = args.leases.announce;
    let epochs = || probe::epochs(fence.clone(), schema, announce);
    // The server refuses requests above `max_waiting` itself. The store also counts the positions
    // that it keeps for clients that may retry, so its limit must be higher.
    let max_waiters = 2 * args.limits.max_waiting as usize;
    let (leases, database, store, place) = match (etcd_urls, redis_urls) {
        (Some(_), Some(_)) => {
            return Err(Failure::configuration(
                "both Redis and etcd are configured: choose one of them",
            ));
        }
        (Some(urls), None) => {
            let leases = args.etcd.connect_lazy(fence.clone(), &urls)?;
            let leases = leases.max_waiters(max_waiters);
            let prefix = args.etcd.key_prefix();
            let place = format!("etcd at {}, prefix {prefix}", addresses(urls.into_iter()));
            let probe = probe::reads(leases.clone(), probe::ANSWERS_READS);
            (boxed(leases, &fence, announce), epochs(), probe, place)
        }
        (None, Some(urls)) => {
            redis.refuse_settings_without_effect()?;
            let mode = redis.redis_mode;
            let urls: Vec<&str> = split_urls(urls.expose()).collect();
            let place = redis.place(&urls);
            let (leases, probe) = if mode == RedisMode::Quorum {
                let leases = redis.quorum(fence.clone(), &urls)?.max_waiters(max_waiters);
                let probe = probe::reads(leases.clone(), probe::NODES_WRITE);
                (boxed(leases, &fence, announce), probe)
            } else {
                let leases = redis.connect_lazy(RedisLeases::builder(fence.clone()), &urls)?;
                let leases = leases.max_waiters(max_waiters);
                let probe = probe::redis(leases.clone());
                (boxed(leases, &fence, announce), probe)
            };
            (leases, epochs(), probe, place)
        }
        (None, None) if !announce => {
            return Err(Failure::configuration(
                "--announce can be false only if the leases are in Redis or etcd: set TOWER_FENCE_REDIS_URL or \
                 TOWER_FENCE_ETCD_URL",
            ));
        }
        (None, None) => {
            if args.database.transaction_pooling && args.database.listen()?.is_none() {
                tracing::warn!(
                    "without --listen-url, waiters poll four times a second and are not served in order"
                );
            }
            let leases = args.database.leases(fence.clone())?;
            let leases = BoxLeases::new(leases.max_waiters(max_waiters));
            let grants = probe::grants(fence.clone(), leases.clone(), schema);
            let answers = probe::answers(fence.clone());
            (leases, answers, grants, "the database".into())
        }
    };
    let issuer = Issuer::new(leases.clone())
        .ttl(args.leases.ttl)
        .ttl_limits(args.leases.min_ttl..=args.leases.max_ttl)
        .wait_limit(args.leases.max_wait)
        .close_on(stop.clone().queue_over());
    let mut document = issuer.operator_openapi();
    describe(&mut document, access);
    let mut issuer = issuer.serve_openapi(document);
    if let Some(keys) = keys {
        issuer = issuer.sign_with(keys);
    }
    Ok(Mounted {
        locks: issuer.operator_router(),
        console: Console::new(fence, leases, events).router(),
        health: Health::new(database, store, stop),
        place,
        is_in_etcd,
    })
}

fn check_ttls(leases: &LeaseArgs) -> Result<(), Failure> {
    let limits = leases.min_ttl..=leases.max_ttl;
    if !limits.contains(&leases.ttl) || leases.min_ttl.is_zero() {
        return Err(Failure::configuration(
            "--ttl must be from --min-ttl to --max-ttl, and --min-ttl must be above 0",
        ));
    }
    Ok(())
}

/// Returns the leases of a store other than the database, with announced grants if configured.
fn boxed<B: Backend>(leases: Driver<B>, fence: &Fence<Postgres>, announce: bool) -> BoxLeases {
    match announce {
        true => BoxLeases::new(leases.announced_to(fence.clone())),
        false => BoxLeases::new(leases),
    }
}
