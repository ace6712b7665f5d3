//! The connections of the server: their maximum number, and the shutdown.
//!
//! 1. If the maximum is reached, a new connection replaces another one. Connections that have sent
//!    nothing for a second are replaced first, then those that are slow to send a request, then
//!    idle ones, then those that have accepted no bytes of a response for three seconds, then those
//!    that were opened within the last second. Otherwise, clients that never send a body, or never
//!    read, could occupy all connections. Any other connection with a request is not replaced. The
//!    server logs a warning when it replaces connections.
//! 2. When the server closes, each accepted connection has a second to send the complete head of a
//!    request. Otherwise it is closed, even if it has sent a part of a TLS handshake or of a head.
//!
//! Neither `axum::serve` (axum 0.8) nor axum-server (0.8) suffices. Neither limits the number of
//! connections, so a client that opens many would use up the file descriptors of the process. At
//! shutdown, both drop the listener, which resets the connections in its queue, and immediately
//! close each idle connection, although its next request may be in transit. During a rolling
//! restart, clients would see these requests fail.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::Router;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout},
};
use tokio_util::task::TaskTracker;

use super::{
    args::LimitArgs,
    connection::{Connection, LAST_REQUEST, Shared},
    metrics,
    phase::State,
    stop::Stop,
    tls::Tls,
};

/// The number of file descriptors to keep free for the stores, the log and the runtime.
const OTHER_FILES: u64 = 200;
/// Interval at which the server searches for a connection to replace, while every connection has a
/// request.
const SEARCH_INTERVAL: Duration = Duration::from_millis(50);

pub struct Connections {
    pub most: u32,
    free: Arc<Semaphore>,
    open: Arc<OpenConnections>,
    tasks: TaskTracker,
    shared: Shared,
    tls: Option<Tls>,
}

impl Connections {
    /// If the leases are in etcd, each request may use a second connection, to etcd.
    pub fn new(limits: &LimitArgs, stores_in_etcd: bool, tls: Option<Tls>, stop: Stop) -> Self {
        let files = raise_file_limit().saturating_sub(OTHER_FILES);
        let files = if stores_in_etcd { files / 2 } else { files };
        let wanted = limits.max_connections;
        let most = wanted.min(u32::try_from(files.max(1)).unwrap_or(u32::MAX));
        if most < wanted {
            tracing::warn!(
                wanted,
                free = most,
                "fewer connections than configured, because of the limit on open files"
            );
        }
        Self {
            most,
            free: Arc::new(Semaphore::new(most as usize)),
            open: Arc::default(),
            tasks: TaskTracker::new(),
            shared: Shared {
                client_timeout: limits.client_timeout,
                idle_timeout: limits.idle_timeout,
                drain: limits.drain,
                stop,
            },
            tls,
        }
    }

    /// Serves until the server closes, then until the accepted requests are answered, at most for
    /// the time of `--drain`.
    pub async fn serve(self, listener: TcpListener, app: Router) {
        metrics::connections_limit(self.most);
        let stop = self.shared.stop.clone();
        loop {
            let next = async {
                let accepted = listener.accept().await;
                (accepted, self.permit().await)
            };
            let (accepted, permit) = tokio::select! {
                next = next => next,
                () = stop.closing() => break,
            };
            match accepted {
                Ok((stream, peer)) => self.begin(stream, peer, permit, &app),
                Err(error) => {
                    tracing::warn!(
                        error = error.to_string(),
                        "a connection could not be accepted"
                    );
                    // If the process has no file descriptors left, wait until connections are
                    // closed.
                    sleep(Duration::from_millis(50)).await;
                }
            }
        }
        self.accept_rest(listener, &app);
        // Leaves time to send a response that is ready at the last moment.
        let limit = self.shared.drain.max(LAST_REQUEST) + Duration::from_secs(1);
        self.tasks.close();
        if timeout(limit, self.tasks.wait()).await.is_err() {
            tracing::warn!("some connections did not close within --drain");
        }
    }

    /// Accepts the connections that wait in the queue of the system, because the system would reset
    /// them when the listener is closed. Then closes the listener.
    fn accept_rest(&self, listener: TcpListener, app: &Router) {
        // Tokio's `accept` misses a connection of which the runtime has not been notified yet.
        let Ok(listener) = listener.into_std() else {
            return;
        };
        while let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
            let Ok((stream, peer)) = listener.accept() else {
                return;
            };
            let stream = stream
                .set_nonblocking(true)
                .and_then(|()| TcpStream::from_std(stream));
            match stream {
                Ok(stream) => self.begin(stream, peer, permit, app),
                Err(error) => tracing::warn!(
                    error = error.to_string(),
                    "a connection could not be accepted"
                ),
            }
        }
    }

    /// Returns the permit for a new connection. If none is free, closes another connection that may
    /// be replaced.
    async fn permit(&self) -> OwnedSemaphorePermit {
        let free = || Arc::clone(&self.free);
        if let Ok(permit) = free().try_acquire_owned() {
            return permit;
        }
        loop {
            self.open.replace_one();
            if let Ok(Ok(permit)) = timeout(SEARCH_INTERVAL, free().acquire_owned()).await {
                return permit;
            }
        }
    }

    fn begin(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        permit: OwnedSemaphorePermit,
        app: &Router,
    ) {
        let (state, entry) = self.open.enter();
        let connection = Connection {
            app: app.clone(),
            // A listener for IPv6 reports IPv4 addresses in another form.
            peer: SocketAddr::new(peer.ip().to_canonical(), peer.port()),
            state,
            shared: self.shared.clone(),
        };
        let tls = self.tls.clone();
        self.tasks.spawn(async move {
            let (_permit, _entry) = (permit, entry);
            connection.begin(stream, tls).await;
        });
    }
}

/// The open connections.
#[derive(Default)]
struct OpenConnections {
    states: Mutex<(u64, HashMap<u64, Arc<State>>)>,
}

/// The entry of a connection. It is removed on drop.
struct Entry {
    number: u64,
    all: Arc<OpenConnections>,
}

impl OpenConnections {
    fn states(&self) -> MutexGuard<'_, (u64, HashMap<u64, Arc<State>>)> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(self: &Arc<Self>) -> (Arc<State>, Entry) {
        let state = Arc::new(State::new());
        let mut states = self.states();
        states.0 += 1;
        let number = states.0;
        states.1.insert(number, Arc::clone(&state));
        metrics::open_connections(states.1.len());
        let all = Arc::clone(self);
        (state, Entry { number, all })
    }

    /// Notifies the next connection to be replaced, if there is one.
    fn replace_one(&self) {
        let now = Instant::now();
        let states = self.states();
        let ranks = states.1.values();
        let ranked = ranks.filter_map(|state| Some((state.rank(now)?, state)));
        if let Some((_, state)) = ranked.min_by_key(|(rank, _)| *rank) {
            state.replace();
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut states = self.all.states();
        states.1.remove(&self.number);
        metrics::open_connections(states.1.len());
    }
}

/// Raises the process's limit on open files to its hard limit, and returns it.
fn raise_file_limit() -> u64 {
    let now = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: now.maximum,
        maximum: now.maximum,
    };
    let raised = setrlimit(Resource::Nofile, most).is_ok();
    let limit = if raised { now.maximum } else { now.current };
    limit.unwrap_or(u64::MAX)
}
