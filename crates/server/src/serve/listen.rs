//! The address to listen on.

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
};

use tokio::net::{TcpListener, TcpSocket, lookup_host};

use super::access::Access;
use crate::failure::{Failure, UNAVAILABLE, chain};

pub async fn listen(address: &str, access: &Access) -> Result<TcpListener, Failure> {
    let found = addresses(address, access).await?;
    let bound = TcpListener::bind(found.as_slice()).await;
    bound.map_err(|error| not_bound(address, &error))
}

/// Resolves the addresses to listen on. Fails if one of them would expose the leases to other
/// machines by mistake.
pub async fn addresses(address: &str, access: &Access) -> Result<Vec<SocketAddr>, Failure> {
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
    if access.is_local_only() && found.iter().any(|address| !address.ip().is_loopback()) {
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

/// Binds the first address that can be bound, as [`listen`] does, and releases it immediately. Does
/// not listen, so that a server can start at the same time.
pub fn try_bind(found: &[SocketAddr]) -> io::Result<()> {
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
pub fn not_bound(address: &str, error: &io::Error) -> Failure {
    let text = format!("cannot listen on {address}: {}", chain(error));
    match error.kind() {
        ErrorKind::PermissionDenied => Failure::configuration(format!(
            "{text}: a port below 1024 requires CAP_NET_BIND_SERVICE: choose a higher port, or add \
             AmbientCapabilities=CAP_NET_BIND_SERVICE and CapabilityBoundingSet=CAP_NET_BIND_SERVICE to the systemd unit"
        )),
        _ => Failure::new(UNAVAILABLE, text),
    }
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
