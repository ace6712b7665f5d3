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

use super::access::Caller;

/// The limits for one kind of request.
#[derive(Clone)]
pub struct Limit {
    kind: &'static str,
    free: Arc<Semaphore>,
    callers: Arc<Callers>,
}

/// The requests of each caller, and their maximum number.
struct Callers {
    each: usize,
    requests: Mutex<HashMap<Source, usize>>,
    refused: Sampler,
}

/// The caller of a request: its secret, or its address if the server has no secrets.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Source {
    Secret(Caller),
    Address(IpAddr),
}

/// The permit of a request.
pub type Place = (OwnedSemaphorePermit, CallersPlace);

pub struct CallersPlace {
    callers: Arc<Callers>,
    source: Source,
}

impl Source {
    fn of(request: &Request) -> Self {
        if let Some(caller) = request.extensions().get::<Caller>() {
            return Self::Secret(*caller);
        }
        // The connection adds the address of its peer to each request.
        let peer = request.extensions().get::<SocketAddr>();
        let ip = peer.map_or(Ipv4Addr::UNSPECIFIED.into(), SocketAddr::ip);
        // A listener for IPv6 reports the address of an IPv4 client as an IPv6 address.
        Self::Address(match ip.to_canonical() {
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
            ip => ip,
        })
    }
}

impl Callers {
    fn enter(self: &Arc<Self>, source: Source) -> Option<CallersPlace> {
        let mut requests = self.requests();
        let count = requests.entry(source).or_default();
        if *count >= self.each {
            return None;
        }
        *count += 1;
        let callers = Arc::clone(self);
        Some(CallersPlace { callers, source })
    }

    fn requests(&self) -> MutexGuard<'_, HashMap<Source, usize>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CallersPlace {
    fn drop(&mut self) {
        let mut requests = self.callers.requests();
        if let Some(count) = requests.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                requests.remove(&self.source);
            }
        }
    }
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
    pub fn place(&self, request: &Request) -> Result<Place, String> {
        self.enter(request).inspect_err(|limit| {
            if let Some(suppressed) = self.callers.refused.next() {
                let peer = request.extensions().get::<SocketAddr>();
                let peer = peer.map(tracing::field::display);
                tracing::warn!(peer, suppressed, "refused a request: {limit}");
            }
        })
    }

    fn enter(&self, request: &Request) -> Result<Place, String> {
        let permit = Arc::clone(&self.free).try_acquire_owned();
        let permit = permit.map_err(|_| format!("the limit of {} is reached", self.kind))?;
        let caller = self.callers.enter(Source::of(request));
        let caller =
            caller.ok_or_else(|| format!("this caller's limit of {} is reached", self.kind))?;
        Ok((permit, caller))
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
        let same = |one, other| Source::of(&request(one)) == Source::of(&request(other));
        assert!(same("[2001:db8::1]:1", "[2001:db8::2]:2"));
        assert!(!same("[2001:db8::1]:1", "[2001:db8:0:1::1]:1"));
        assert!(same("192.0.2.1:1", "[::ffff:192.0.2.1]:2"));
        assert!(!same("[::ffff:192.0.2.1]:1", "[::ffff:192.0.2.2]:1"));
    }

    #[test]
    fn a_caller_has_at_most_half_of_the_requests() {
        let limit = Limit::new("requests", 4, None);
        let place = |peer| limit.place(&request(peer));
        let held = ["192.0.2.1:1", "192.0.2.1:2"].map(|peer| place(peer).unwrap());
        let refused = place("192.0.2.1:3").err().unwrap();
        assert!(refused.starts_with("this caller's limit"), "{refused}");
        let other = place("192.0.2.2:1").unwrap();
        drop(held);
        drop((place("192.0.2.1:3").unwrap(), other));
        assert!(limit.callers.requests().is_empty());
    }
}
