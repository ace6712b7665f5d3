//! `serve`: the issuer over HTTP.
//!
//! [`routes`] adds all routes. Every route for leases requires the secret of an operator, unless
//! [`access`] lists it for holders.

mod access;
mod args;
mod bodies;
pub mod check;
mod connection;
mod connections;
mod describe;
mod etcd;
mod fit;
mod health;
mod limits;
mod metrics;
mod phase;
mod probe;
mod redis;
mod reload;
mod stop;
mod store;
mod tls;
mod under_way;

use std::{
    io::{self, ErrorKind, Write},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use axum::{Router, middleware::from_fn_with_state, routing::get};
use tokio::{
    net::{TcpListener, TcpSocket, lookup_host},
    time::timeout,
};
use tower_fence::{
    TokenKeys,
    problem::{Problem, ProblemType},
};

use self::{
    access::Access, args::LeaseArgs, connections::Connections, fit::Fit, health::Health,
    reload::Reload, stop::Stop, store::Mounted, tls::Tls, under_way::UnderWay,
};
pub use self::{
    args::ServeArgs,
    check::{CheckArgs, check},
};
use crate::{
    database,
    failure::{Failure, UNAVAILABLE, chain},
    logs,
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
        let listener = listen(&args.listen, &access, args.access.allow_anyone).await?;
        if args.migrate {
            let (direct, place) = args.database.reached_directly(&args.first).await?;
            if database::migrate(&direct, &place).await? {
                let schema = args.database.schema.name();
                tracing::info!(
                    database = %place, %schema, "created or updated the tables, functions and privileges"
                );
                if let Ok(Some(others)) = check::other_fences(&direct, schema).await {
                    tracing::warn!(
                        %schema, %others, "this database also has a fence in another schema"
                    );
                }
            }
            direct.pool().close().await;
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
        %address, scheme, %database, %schema, leases = %place, announce, signed, access = %access, "started"
    );
    if tls.is_none() && access.has_secrets() && !address.ip().is_loopback() {
        tracing::warn!(
            "secrets arrive unencrypted: configure a certificate, or let a proxy terminate TLS"
        );
    }
    tokio::spawn(async move {
        tokio::select! {
            () = health.tell() => {}
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

/// Returns all routes. /healthz, /readyz and /metrics are open to all clients. Every other route
/// requires the secret of an operator, unless it is listed for holders.
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

/// Resolves the addresses to listen on. Fails if one of them would expose the leases to other
/// machines by mistake.
async fn addresses(
    address: &str,
    access: &Access,
    anyone: bool,
) -> Result<Vec<SocketAddr>, Failure> {
    if !is_host_and_port(address) {
        return Err(Failure::configuration(format!(
            "cannot listen on {address}: expected an address and a port, such as 127.0.0.1:4120"
        )));
    }
    // The lookup of a name can fail temporarily.
    let found = lookup_host(address).await;
    let found: Vec<SocketAddr> = found
        .map_err(|error| Failure::unavailable(&format!("cannot listen on {address}"), &error))?
        .collect();
    let open = !access.has_secrets() && !anyone;
    if open && found.iter().any(|address| !address.ip().is_loopback()) {
        return Err(Failure::configuration(format!(
            "without a secret, any client that can reach {address} could acquire and break leases: name a file with \
             secrets (TOWER_FENCE_HOLDER_SECRETS_FILE, TOWER_FENCE_OPERATOR_SECRETS_FILE), listen on 127.0.0.1, \
             or pass --allow-anyone"
        )));
    }
    Ok(found)
}

/// Returns whether a text is an address or a name with a port. Does not resolve the name.
fn is_host_and_port(text: &str) -> bool {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
    let is_named = |(host, port): (&str, &str)| {
        !host.is_empty() && host.chars().all(is_name) && port.parse::<u16>().is_ok()
    };
    text.parse::<SocketAddr>().is_ok() || text.rsplit_once(':').is_some_and(is_named)
}

async fn listen(address: &str, access: &Access, anyone: bool) -> Result<TcpListener, Failure> {
    let found = addresses(address, access, anyone).await?;
    let bound = TcpListener::bind(found.as_slice()).await;
    bound.map_err(|error| not_bound(address, &error))
}

/// Binds the first address that can be bound, as [`listen`] does, and releases it immediately. Does
/// not listen, so that a server can start at the same time.
fn try_bind(found: &[SocketAddr]) -> io::Result<()> {
    let mut outcome = Ok(());
    for &address in found {
        outcome = bind(address);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

fn bind(address: SocketAddr) -> io::Result<()> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // The server's socket has this option, too.
    socket.set_reuseaddr(true)?;
    socket.bind(address)
}

/// Returns the failure for an address that cannot be bound. A restart cannot correct a missing
/// privilege.
fn not_bound(address: &str, error: &io::Error) -> Failure {
    let text = format!("cannot listen on {address}: {}", chain(error));
    match error.kind() {
        ErrorKind::PermissionDenied => Failure::configuration(format!(
            "{text}: a port below 1024 requires CAP_NET_BIND_SERVICE: choose a higher port, or add \
             AmbientCapabilities=CAP_NET_BIND_SERVICE and CapabilityBoundingSet=CAP_NET_BIND_SERVICE to the systemd unit"
        )),
        _ => Failure::new(UNAVAILABLE, text),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::CONFIGURATION;

    #[test]
    fn address_has_a_host_and_a_port() {
        for text in [
            "127.0.0.1:4120",
            "[::1]:0",
            "::1:4120",
            "locks.db-1.example:80",
        ] {
            assert!(is_host_and_port(text), "{text}");
        }
        for text in [
            "",
            "4120",
            ":4120",
            "localhost",
            "localhost:http",
            "localhost:65536",
            "[::1]",
            "http://127.0.0.1:4120",
        ] {
            assert!(!is_host_and_port(text), "{text}");
        }
    }

    #[test]
    fn only_a_missing_privilege_to_bind_is_permanent() {
        for (kind, status) in [
            (ErrorKind::PermissionDenied, CONFIGURATION),
            (ErrorKind::AddrInUse, UNAVAILABLE),
            (ErrorKind::AddrNotAvailable, UNAVAILABLE),
        ] {
            let failure = not_bound("127.0.0.1:80", &kind.into());
            assert_eq!(failure.status, status, "{failure:?}");
        }
    }
}
