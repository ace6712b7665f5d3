//! Limits of the requests of one kind that are in progress at the same time: a total limit, and a
//! limit for each caller. If a limit is reached, the log names it and the address of the client.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::extract::Request;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower_fence::sampler::Sampler;

use super::roles::SecretDigest;

/// The limits for one kind of request.
#[derive(Clone)]
pub struct Limit {
    kind: &'static str,
    free: Arc<Semaphore>,
    callers: Arc<Callers>,
}

impl Limit {
    /// Creates the limits for one kind of request. `each` is the limit for each caller, by default
    /// half of the total limit.
    pub fn new(kind: &'static str, total: u32, each: Option<u32>) -> Self {
        Self {
            kind,
            free: Arc::new(Semaphore::new(total as usize)),
            callers: Arc::new(Callers {
                each: each.unwrap_or(total.div_ceil(2)) as usize,
                requests: Mutex::default(),
                refused: Sampler::new(),
            }),
        }
    }

    /// Returns a permit for this request. If a limit is reached, logs and returns its description.
    pub fn permit(&self, request: &Request) -> Result<Permit, String> {
        self.enter(request).inspect_err(|limit| {
            if let Some(suppressed) = self.callers.refused.next() {
                let peer = request.extensions().get::<SocketAddr>();
                let peer = peer.map(tracing::field::display);
                tracing::warn!(peer, suppressed, "refused a request: {limit}");
            }
        })
    }

    fn enter(&self, request: &Request) -> Result<Permit, String> {
        let free = Arc::clone(&self.free).try_acquire_owned();
        let free = free.map_err(|_| format!("the limit on {} is reached", self.kind))?;
        let caller = Caller::of(request);
        if !self.callers.enter(caller) {
            return Err(format!("this caller's limit on {} is reached", self.kind));
        }
        Ok(Permit {
            callers: Arc::clone(&self.callers),
            caller,
            _free: free,
        })
    }
}

/// The permit of a request, until it is dropped.
pub struct Permit {
    callers: Arc<Callers>,
    caller: Caller,
    _free: OwnedSemaphorePermit,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.callers.leave(self.caller);
    }
}

/// The number of requests of each caller, and their maximum number.
struct Callers {
    each: usize,
    requests: Mutex<HashMap<Caller, usize>>,
    refused: Sampler,
}

impl Callers {
    /// Counts a request, unless the caller has reached its limit.
    fn enter(&self, caller: Caller) -> bool {
        let mut requests = self.requests();
        let count = requests.entry(caller).or_default();
        let is_free = *count < self.each;
        *count += usize::from(is_free);
        is_free
    }

    fn leave(&self, caller: Caller) {
        let mut requests = self.requests();
        if let Some(count) = requests.get_mut(&caller) {
            *count -= 1;
            if *count == 0 {
                requests.remove(&caller);
            }
        }
    }

    fn requests(&self) -> MutexGuard<'_, HashMap<Caller, usize>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The caller of a request: its secret, or its address if the server has no secrets.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Caller {
    Secret(SecretDigest),
    Address(IpAddr),
}

impl Caller {
    fn of(request: &Request) -> Self {
        if let Some(secret) = request.extensions().get::<SecretDigest>() {
            return Self::Secret(*secret);
        }
        // The connection adds the address of its peer to each request.
        let peer = request.extensions().get::<SocketAddr>();
        let ip = peer.map_or(Ipv4Addr::UNSPECIFIED.into(), SocketAddr::ip);
        // A listener for IPv6 reports the address of an IPv4 client as an IPv6 address. A client
        // may have all IPv6 addresses of a network.
        Self::Address(match ip.to_canonical() {
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
            ip => ip,
        })
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn request(peer: &str) -> Request {
        let mut request = Request::new(Body::empty());
        let peer: SocketAddr = peer.parse().unwrap();
        request.extensions_mut().insert(peer);
        request
    }

    #[test]
    fn clients_are_told_apart_by_address_or_network() {
        let same = |one, other| Caller::of(&request(one)) == Caller::of(&request(other));
        assert!(same("[2001:db8::1]:1", "[2001:db8::2]:2"));
        assert!(!same("[2001:db8::1]:1", "[2001:db8:0:1::1]:1"));
        assert!(same("192.0.2.1:1", "[::ffff:192.0.2.1]:2"));
        assert!(!same("[::ffff:192.0.2.1]:1", "[::ffff:192.0.2.2]:1"));
    }

    #[test]
    fn a_caller_has_at_most_half_of_the_requests() {
        let limit = Limit::new("requests", 4, None);
        let permit = |peer| limit.permit(&request(peer));
        let held = ["192.0.2.1:1", "192.0.2.1:2"].map(|peer| permit(peer).unwrap());
        let refused = permit("192.0.2.1:3").err().unwrap();
        assert!(refused.starts_with("this caller's limit"), "{refused}");
        let other = permit("192.0.2.2:1").unwrap();
        drop(held);
        drop((permit("192.0.2.1:3").unwrap(), other));
        assert!(limit.callers.requests().is_empty());
    }
}
