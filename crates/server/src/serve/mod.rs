//! `serve`: the issuer over HTTP.
//!
//! [`routes`] adds all routes. Every route for leases requires the secret of an operator, unless
//! [`access`] lists it for holders.

mod access;
mod args;
mod bodies;
mod check;
mod connection;
mod connections;
mod describe;
mod etcd;
mod fit;
mod health;
mod limits;
mod listen;
mod metrics;
mod phase;
mod probe;
mod recent_grants;
mod redis;
mod reload;
mod roles;
mod stop;
mod store;
mod tls;
mod under_way;

use std::{
    io::{self, Write},
    sync::Arc,
    time::Duration,
};

use axum::{Router, middleware::from_fn_with_state, routing::get};
use tokio::time::timeout;
use tower_fence::{
    TokenKeys,
    problem::{Problem, ProblemType},
};

use self::{
    access::Access, args::LeaseArgs, connections::Connections, fit::Fit, health::Health,
    listen::listen, reload::Reload, stop::Stop, store::Mounted, tls::Tls, under_way::UnderWay,
};
pub use self::{
    args::ServeArgs,
    check::{CheckArgs, check},
};
use crate::{
    failure::{Failure, chain},
    logs, migration,
    secrets::Secret,
};

/// The path of the lease API.
const LOCKS: &str = "/locks";
/// The timeout for closing the connections to the database.
const CLOSING: Duration = Duration::from_secs(2);

pub async fn serve(args: ServeArgs, unknown_variables: &[String]) -> Result<u8, Failure> {
    let events = logs::start(args.log_format, &args.log)?;
    for variable in unknown_variables {
        tracing::warn!(
            variable,
            "unknown environment variable, which has no effect"
        );
    }
    // Install the signal handlers before any step that can take a long time. Process 1 ignores
    // signals that have no handler, and SIGHUP would end any other process.
    let stop = Stop::on_signals(args.limits.drain_delay)?;
    let hangups = reload::hangups()?;
    let access = Access::read(&args.access)?;
    let tls = Tls::read(&args.access)?;
    tls::warn_if_outdated(&args.access);
    let token_keys = token_keys(&args.leases)?;
    let reload = Reload::new(&args, access.clone(), tls.clone(), token_keys.clone());
    reload.on_each(hangups);
    let (fence, database) = args.database.fence(args.database_connections)?;
    let Mounted {
        locks,
        console,
        health,
        place,
        is_in_etcd,
    } = store::mount(
        &args,
        fence.clone(),
        token_keys.clone(),
        &access,
        events,
        stop.clone(),
    )?;

    let fit = Fit {
        args: &args.database,
        fence: fence.clone(),
        place: database.clone(),
    };
    let starting = async {
        let listener = listen(&args.listen, &access).await?;
        if args.migrate {
            migrate(&args).await?;
        }
        Ok((listener, fit.at_start().await?))
    };
    let (listener, is_fit) = tokio::select! {
        started = starting => started?,
        () = stop.begun() => {
            tracing::info!("stopped during startup");
            return Ok(0);
        }
    };
    let address = listener.local_addr();
    let address =
        address.map_err(|error| Failure::unavailable("cannot read the local address", &error))?;

    let connections = Connections::new(&args.limits, is_in_etcd, tls.clone(), stop.clone());
    let under_way = UnderWay::new(
        &args.limits,
        connections.most,
        stop.clone(),
        health.grants(),
    );
    let health = Arc::new(health);
    let app = routes(
        locks,
        console,
        access.clone(),
        under_way.clone(),
        Arc::clone(&health),
    )?;

    let scheme = if tls.is_some() { "https" } else { "http" };
    _ = writeln!(io::stdout(), "tower-fence listens on {scheme}://{address}");
    let signed = token_keys.is_some();
    let (schema, announce) = (args.database.schema.name(), args.leases.announce);
    tracing::info!(
        %address, scheme, %database, %schema, leases = %place, announce, signed, access = %access.secrets(), "started"
    );
    if tls.is_none() && access.has_secrets() && !address.ip().is_loopback() {
        tracing::warn!(
            "no certificate is configured: unless a proxy terminates TLS, clients send secrets unencrypted"
        );
    }
    tokio::spawn(async move {
        tokio::select! {
            () = health.check_until_ready() => {}
            () = stop.begun() => {}
        }
    });

    tokio::select! {
        () = connections.serve(listener, app) => {}
        unfit = fit.until_unfit(is_fit) => return Err(unfit),
    }
    under_way.settle().await;
    // A database that hangs must not delay the exit.
    _ = timeout(CLOSING, fence.pool().close()).await;
    tracing::info!("stopped");
    Ok(0)
}

/// Creates or updates the tables, and reports other fences in the database after a change.
async fn migrate(args: &ServeArgs) -> Result<(), Failure> {
    let (direct, place) = args.database.reached_directly(&args.first).await?;
    if migration::migrate(&direct, &place).await? {
        let schema = args.database.schema.name();
        tracing::info!(
            database = %place, %schema, "created or updated the tables, functions and privileges"
        );
        if let Ok(Some(others)) = migration::other_fences(&direct, schema).await {
            tracing::warn!(%schema, %others, "this database also has a fence in another schema");
        }
    }
    direct.pool().close().await;
    Ok(())
}

/// Returns all routes. /healthz, /readyz and /metrics are open to all clients.
fn routes(
    locks: Router,
    console: Router,
    access: Access,
    under_way: UnderWay,
    health: Arc<Health>,
) -> Result<Router, Failure> {
    let locks = Router::new()
        .nest(LOCKS, locks)
        .route_layer(from_fn_with_state(under_way, under_way::limit))
        .nest_service(access::CONSOLE, console)
        .route_layer(from_fn_with_state(access, access::check));
    Ok(Router::new()
        .merge(locks)
        .route("/healthz", get(health::alive))
        .route("/readyz", get(health::ready).with_state(health))
        .route("/metrics", metrics::route()?)
        .fallback(async || Problem::new(ProblemType::UnknownRoute)))
}

/// Reads the keys that sign tokens; `None` if none are configured.
fn token_keys(args: &LeaseArgs) -> Result<Option<TokenKeys>, Failure> {
    let file = args.token_key_file.as_deref();
    let Some(text) = Secret::find("TOWER_FENCE_TOKEN_KEY", file)? else {
        return Ok(None);
    };
    let keys = text.expose().parse();
    keys.map(Some)
        .map_err(|error| Failure::configuration(format!("invalid token keys: {}", chain(&error))))
}
