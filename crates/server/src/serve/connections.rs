//! Connections: their maximum number, the timeouts for slow clients, and the shutdown.
//!
//! 1. The protocol is HTTP/1.1 with keep-alive. The head of a request has at most 16 KiB. The
//!    issuer limits the length of a body and the time to send it.
//! 2. At the limit, a new connection replaces one that has sent nothing, one that is slow to send
//!    the head of a request, or one that is idle, in this order. A connection with a request is not
//!    replaced.
//! 3. When the server closes, each accepted connection has a second to send a complete request.
//!    Otherwise it is closed, even if it has sent a part of a TLS handshake or of a head.
//!
//! The server has its own accept loop, because `axum::serve` has no such limits.

use std::{
    collections::HashMap,
    future::poll_fn,
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{Router, body::Body, extract::Request, response::Response};
use http::{HeaderValue, header::CONNECTION};
use http_body::{Frame, SizeHint};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_io_timeout::TimeoutStream;
use tower_service::Service;

use super::{args::LimitArgs, metrics::Open, stop::Stop, tls::Tls};

/// The maximum length of the head of a request.
const HEAD_LIMIT_BYTES: usize = 16 * 1024;
/// The number of file descriptors to keep free for the stores, the log and the runtime.
const OTHER_FILES: u64 = 200;
/// How long a connection without a request stays open after the server has closed: its next request
/// may be in transit.
const LAST_REQUEST: Duration = Duration::from_secs(1);
/// The age at which an incomplete head of a request counts as slow.
const SLOW_HEAD: Duration = Duration::from_secs(1);
/// How often a new connection searches for one to replace, while each has a request.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

pub struct Connections {
    free: Arc<Semaphore>,
    open: Arc<Places>,
    shared: Shared,
    tls: Option<Tls>,
}

/// The settings of the server that each connection shares.
#[derive(Clone)]
struct Shared {
    client_timeout: Duration,
    idle_timeout: Duration,
    drain: Duration,
    stop: Stop,
}

impl Connections {
    pub fn new(limits: &LimitArgs, tls: Option<Tls>, stop: Stop) -> Self {
        let files = raise_file_limit();
        let wanted = u64::from(limits.max_connections);
        let free = wanted.min(files.saturating_sub(OTHER_FILES).max(1));
        if free < wanted {
            tracing::warn!(
                wanted,
                free,
                "fewer connections than configured: the process may not open more files"
            );
        }
        Self {
            free: Arc::new(Semaphore::new(free as usize)),
            open: Arc::default(),
            shared: Shared {
                client_timeout: limits.client_timeout,
                idle_timeout: limits.idle_timeout,
                drain: limits.drain,
                stop,
            },
            tls,
        }
    }

    /// Serves until the server closes, and then until the accepted requests are answered, but at
    /// most for the time of `--drain`.
    pub async fn serve(self, listener: TcpListener, app: Router) {
        let stop = self.shared.stop.clone();
        loop {
            let next = async {
                let accepted = listener.accept().await;
                (accepted, self.place().await)
            };
            let (accepted, permit) = tokio::select! {
                next = next => next,
                () = stop.closing() => break,
            };
            match accepted {
                Ok((stream, peer)) => self.begin(stream, peer, permit, &app),
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    // If no file descriptors are left, some must be closed first.
                    sleep(Duration::from_millis(50)).await;
                }
            }
        }
        self.accept_rest(listener, &app);
        // Leaves time to send a response that is ready at the last moment.
        let limit = self.shared.drain.max(LAST_REQUEST) + Duration::from_secs(1);
        if timeout(limit, self.open.empty()).await.is_err() {
            tracing::warn!("some connections did not end in time");
        }
    }

    /// Accepts the connections that wait in the queue of the system, because the system would reset
    /// them when the listener is closed. Then closes the listener.
    fn accept_rest(&self, listener: TcpListener, app: &Router) {
        // Tokio's `accept` does not return a connection of which the runtime has not been notified.
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
                Err(error) => tracing::warn!(%error, "a connection could not be accepted"),
            }
        }
    }

    /// Returns the permit for a new connection. If none is free, closes another connection that may
    /// be replaced.
    async fn place(&self) -> OwnedSemaphorePermit {
        let free = || Arc::clone(&self.free);
        if let Ok(permit) = free().try_acquire_owned() {
            return permit;
        }
        loop {
            self.open.give_up_one();
            if let Ok(Ok(permit)) = timeout(LOOK_AGAIN, free().acquire_owned()).await {
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
        let (state, place) = self.open.enter();
        let connection = Connection {
            app: app.clone(),
            peer,
            state,
            shared: self.shared.clone(),
        };
        let tls = self.tls.clone();
        tokio::spawn(async move {
            let (_permit, _open, _place) = (permit, Open::count(), place);
            connection.begin(stream, tls).await;
        });
    }
}

/// The phase of a connection, and when the phase began.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// It has sent nothing except for a TLS handshake.
    Silent(Instant),
    /// It has sent a part of the head of a request.
    Head(Instant),
    /// A request is being answered.
    Request,
    /// Its last request is answered.
    Idle(Instant),
}

/// The shared state of a connection.
struct State {
    phase: Mutex<Phase>,
    /// Notified when another connection replaces this one.
    give_up: Notify,
}

impl State {
    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rank for replacement; `None` if the connection must not be replaced. The
    /// connection with the smallest rank is replaced first.
    fn rank(&self, now: Instant) -> Option<(u8, Instant)> {
        match *self.phase() {
            Phase::Silent(since) => Some((0, since)),
            Phase::Head(since) if now - since >= SLOW_HEAD => Some((1, since)),
            Phase::Idle(since) => Some((2, since)),
            Phase::Head(_) | Phase::Request => None,
        }
    }
}

/// The open connections.
#[derive(Default)]
struct Places {
    states: Mutex<(u64, HashMap<u64, Arc<State>>)>,
    left: Notify,
}

/// The entry of a connection, which is removed when this is dropped.
struct Place {
    number: u64,
    all: Arc<Places>,
}

impl Places {
    fn states(&self) -> MutexGuard<'_, (u64, HashMap<u64, Arc<State>>)> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(self: &Arc<Self>) -> (Arc<State>, Place) {
        let state = Arc::new(State {
            phase: Mutex::new(Phase::Silent(Instant::now())),
            give_up: Notify::new(),
        });
        let mut states = self.states();
        states.0 += 1;
        let number = states.0;
        states.1.insert(number, Arc::clone(&state));
        let all = Arc::clone(self);
        (state, Place { number, all })
    }

    /// Notifies the next connection to be replaced, if there is one.
    fn give_up_one(&self) {
        let now = Instant::now();
        let states = self.states();
        let ranks = states.1.values();
        let ranked = ranks.filter_map(|state| Some((state.rank(now)?, state)));
        if let Some((_, state)) = ranked.min_by_key(|(rank, _)| *rank) {
            state.give_up.notify_one();
        }
    }

    /// Waits until no connection is open.
    async fn empty(&self) {
        loop {
            let left = self.left.notified();
            if self.states().1.is_empty() {
                return;
            }
            left.await;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.states().1.remove(&self.number);
        self.all.left.notify_waiters();
    }
}

struct Connection {
    app: Router,
    peer: SocketAddr,
    state: Arc<State>,
    shared: Shared,
}

/// The reason for the end of a connection.
enum End {
    ByItself(hyper::Result<()>),
    Slow,
    GaveUp,
    Closed,
}

impl Connection {
    async fn begin(self, stream: TcpStream, tls: Option<Tls>) {
        _ = stream.set_nodelay(true);
        let Some(tls) = tls else {
            return self.serve(stream).await;
        };
        let handshake = timeout(self.shared.client_timeout, tls.acceptor().accept(stream));
        let shaken = tokio::select! {
            shaken = handshake => shaken,
            () = self.state.give_up.notified() => return,
            () = self.last_request() => return,
        };
        match shaken {
            Ok(Ok(stream)) => self.serve(stream).await,
            Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
            Err(_) => tracing::debug!("TLS handshake timed out"),
        }
    }

    /// Waits until connections without a request must close.
    async fn last_request(&self) {
        self.shared.stop.closing().await;
        sleep(LAST_REQUEST).await;
    }

    async fn serve(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let mut stream = TimeoutStream::new(Watched {
            stream,
            state: Arc::clone(&self.state),
        });
        // Ends the connection if the client does not read the response. The phases limit the time
        // to send a request.
        stream.set_write_timeout(Some(self.shared.client_timeout));
        let service = service_fn(|request: hyper::Request<Incoming>| self.answer(request));
        let mut connection = pin!(
            http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(None)
                .max_buf_size(HEAD_LIMIT_BYTES)
                .serve_connection(TokioIo::new(Box::pin(stream)), service)
        );
        let mut closed = pin!(self.last_request());
        let end = loop {
            let end = tokio::select! {
                end = self.drive(connection.as_mut()) => end,
                () = self.state.give_up.notified() => End::GaveUp,
                () = closed.as_mut() => End::Closed,
            };
            let has_request = *self.state.phase() == Phase::Request;
            match end {
                // A request arrived at the same moment.
                End::GaveUp if has_request => {}
                End::Closed if has_request => {
                    connection.as_mut().graceful_shutdown();
                    // The server waits for the response at most for the time of `--drain`.
                    break self.drive(connection).await;
                }
                end => break end,
            }
        };
        match end {
            End::ByItself(Ok(())) => {}
            End::ByItself(Err(error)) => tracing::debug!(%error, "a connection ended early"),
            End::Slow => tracing::debug!("a connection was closed: no request in time"),
            End::GaveUp => tracing::debug!("a connection was closed: another one replaces it"),
            End::Closed => tracing::debug!("a connection was closed: the server is stopping"),
        }
    }

    /// Serves requests until the connection ends, or takes too long to send the next one.
    async fn drive(
        &self,
        mut connection: Pin<&mut impl Future<Output = hyper::Result<()>>>,
    ) -> End {
        let mut slow = pin!(sleep_until(Instant::now()));
        poll_fn(|cx| {
            if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
                return Poll::Ready(End::ByItself(ended));
            }
            // The phase changes only during the poll above, so it is read after that.
            let limit = match *self.state.phase() {
                Phase::Silent(since) | Phase::Head(since) => since + self.shared.client_timeout,
                Phase::Idle(since) => since + self.shared.idle_timeout,
                Phase::Request => return Poll::Pending,
            };
            if slow.deadline() != limit {
                slow.as_mut().reset(limit);
            }
            slow.as_mut().poll(cx).map(|()| End::Slow)
        })
        .await
    }

    async fn answer(
        &self,
        request: hyper::Request<Incoming>,
    ) -> Result<Response, std::convert::Infallible> {
        *self.state.phase() = Phase::Request;
        let under_way = UnderWay(Arc::clone(&self.state));
        let mut request: Request = request.map(Body::new);
        request.extensions_mut().insert(self.peer);
        let mut app = self.app.clone();
        let mut response = app.call(request).await?;
        if self.shared.stop.has_begun() {
            let headers = response.headers_mut();
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response.map(|body| {
            Body::new(Answer {
                body,
                _under_way: under_way,
            })
        }))
    }
}

/// A request, until its response has been sent or dropped.
struct UnderWay(Arc<State>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        *self.0.phase() = Phase::Idle(Instant::now());
    }
}

/// The body of a response.
struct Answer {
    body: Body,
    _under_way: UnderWay,
}

impl http_body::Body for Answer {
    type Data = bytes::Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<bytes::Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that updates the phase when bytes arrive.
struct Watched<S> {
    stream: S,
    state: Arc<State>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let mut phase = self.state.phase();
        if buf.filled().len() > before && matches!(*phase, Phase::Silent(_) | Phase::Idle(_)) {
            *phase = Phase::Head(Instant::now());
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Raises the limit of open files of the process to its hard limit, and returns it.
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
