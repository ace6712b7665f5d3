//! A connection, and the timeout of each of its phases.
//!
//! The protocol is HTTP/1.1 with keep-alive. The head of a request has at most 16 KiB. hyper
//! answers a longer one with 431 and an empty body, before any route is known. The issuer limits
//! the length of a body and the time to send it.

use std::{
    future::poll_fn,
    io::{self, ErrorKind},
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{Arc, atomic::Ordering::SeqCst},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{Router, body::Body, extract::Request, response::Response};
use http::{
    HeaderValue,
    header::{CONNECTION, EXPECT},
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::io::InspectReader;
use tower_fence::sampler::Sampler;
use tower_service::Service;

use super::{
    bodies::{Answering, RequestBody},
    phase::{Phase, State},
    stop::Stop,
    tls::Tls,
};

/// The maximum length of the head of a request.
const HEAD_LIMIT_BYTES: usize = 16 * 1024;
/// How long a connection without a request stays open during the shutdown, because its next request
/// may be in transit.
pub(super) const LAST_REQUEST: Duration = Duration::from_secs(1);
/// The maximum time for which a response produces data: that of the console's event stream.
const LONGEST_STREAM: Duration = Duration::from_secs(10);

/// The settings of the server that each connection shares.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) client_timeout: Duration,
    pub(super) idle_timeout: Duration,
    pub(super) drain: Duration,
    pub(super) stop: Stop,
}

pub(super) struct Connection {
    pub(super) app: Router,
    pub(super) peer: SocketAddr,
    pub(super) state: Arc<State>,
    pub(super) shared: Shared,
}

/// The reason for the end of a connection.
enum End {
    ByItself(hyper::Result<()>),
    Slow,
    Replaced,
    Closed,
}

impl Connection {
    pub(super) async fn begin(self, stream: TcpStream, tls: Option<Tls>) {
        _ = stream.set_nodelay(true);
        // Record the progress below TLS, because the buffer of TLS hides whether the client reads.
        let state = Arc::clone(&self.state);
        let stream = Progress { stream, state };
        let Some(tls) = tls else {
            return self.serve(stream).await;
        };
        let handshake = timeout(self.shared.client_timeout, tls.acceptor().accept(stream));
        let shaken = tokio::select! {
            shaken = handshake => shaken,
            () = self.state.replaced.notified() => return self.report_replaced(),
            () = self.last_request() => return,
        };
        match shaken {
            Ok(Ok(stream)) => self.serve(stream).await,
            Ok(Err(error)) => self.report_handshake(&error),
            Err(_) => tracing::debug!(peer = %self.peer, "TLS handshake timed out"),
        }
    }

    /// Logs a failed TLS handshake. A client that only closes the connection may be a load balancer
    /// that checks the port, so its line has the level of other connections that end early.
    fn report_handshake(&self, error: &io::Error) {
        static FAILED: Sampler = Sampler::new();
        let peer = self.peer;
        if error.kind() != ErrorKind::InvalidData {
            tracing::debug!(%peer, error = error.to_string(), "TLS handshake failed");
        } else if let Some(suppressed) = FAILED.next() {
            tracing::info!(%peer, error = error.to_string(), suppressed, "TLS handshake failed");
        }
    }

    /// Logs that the maximum number of connections is reached, and that this one was closed.
    fn report_replaced(&self) {
        static REPLACED: Sampler = Sampler::new();
        if let Some(suppressed) = REPLACED.next() {
            let peer = self.peer;
            tracing::warn!(
                %peer,
                suppressed,
                "the limit on connections is reached: closed a connection for a new one"
            );
        }
    }

    /// Waits until the server closes connections without a request.
    async fn last_request(&self) {
        self.shared.stop.closing().await;
        sleep(LAST_REQUEST).await;
    }

    async fn serve(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let stream = InspectReader::new(stream, |read| self.state.read(read));
        let service = service_fn(|request: hyper::Request<Incoming>| self.answer(request));
        let mut connection = pin!(
            http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(None)
                .max_buf_size(HEAD_LIMIT_BYTES)
                .serve_connection(TokioIo::new(stream), service)
        );
        let mut closed = pin!(self.last_request());
        let end = loop {
            let end = tokio::select! {
                end = self.drive(connection.as_mut()) => end,
                () = self.state.replaced.notified() => End::Replaced,
                () = closed.as_mut() => End::Closed,
                // Poll hyper, which then flushes the stream again.
                () = self.state.drained.notified() => continue,
            };
            match end {
                // At the same moment, a request arrived, or the client read a part of a response.
                End::Replaced if self.state.rank(Instant::now()).is_none() => {}
                End::Closed if self.state.has_request() => {
                    connection.as_mut().graceful_shutdown();
                    // The server waits for the response at most for the time of `--drain`.
                    break self.drive(connection).await;
                }
                end => break end,
            }
        };
        match end {
            End::ByItself(Ok(())) => {}
            End::ByItself(Err(error)) => {
                tracing::debug!(error = error.to_string(), "a connection ended early")
            }
            End::Slow => tracing::debug!("a connection was closed: its client was too slow"),
            End::Replaced => self.report_replaced(),
            End::Closed => tracing::debug!("a connection was closed: the server is stopping"),
        }
    }

    /// Serves requests until the connection ends, or the client takes too long to send the next one
    /// or to read a response.
    async fn drive(
        &self,
        mut connection: Pin<&mut impl Future<Output = hyper::Result<()>>>,
    ) -> End {
        let mut slow = pin!(sleep_until(Instant::now()));
        poll_fn(|cx| {
            if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
                return Poll::Ready(End::ByItself(ended));
            }
            // Only the poll above changes the state.
            let Some(limit) = self.limit() else {
                return Poll::Pending;
            };
            if slow.deadline() != limit {
                slow.as_mut().reset(limit);
            }
            slow.as_mut().poll(cx).map(|()| End::Slow)
        })
        .await
    }

    /// Returns the time at which the connection is closed if its state does not change.
    fn limit(&self) -> Option<Instant> {
        let Shared {
            client_timeout,
            idle_timeout,
            ..
        } = self.shared;
        let of_phase = match *self.state.phase() {
            Phase::Silent(since) | Phase::Head(since) => Some(since + client_timeout),
            Phase::Idle(since) => Some(since + idle_timeout),
            Phase::Sending(since) | Phase::Flushing(since) => {
                Some(since + LONGEST_STREAM + client_timeout)
            }
            Phase::Request(_) => None,
        };
        let unread = self.state.blocked_since();
        let of_unread = unread.map(|since| since + client_timeout);
        of_phase.into_iter().chain(of_unread).min()
    }

    async fn answer(
        &self,
        request: hyper::Request<Incoming>,
    ) -> Result<Response, std::convert::Infallible> {
        *self.state.phase() = Phase::Request(Instant::now());
        let answering = Answering::new(&self.state);
        let may_drain = !request.headers().contains_key(EXPECT);
        let mut request: Request =
            request.map(|body| Body::new(RequestBody::new(body, &self.state, may_drain)));
        request.extensions_mut().insert(self.peer);
        let mut app = self.app.clone();
        let mut response = app.call(request).await?;
        *self.state.phase() = Phase::Sending(Instant::now());
        if self.shared.stop.has_begun() {
            let headers = response.headers_mut();
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response.map(|body| Body::new(answering.until_sent(body))))
    }
}

/// A stream that records whether the client reads what the server sends, and when a response has
/// been sent.
struct Progress<S> {
    stream: S,
    state: Arc<State>,
}

impl<S> Progress<S> {
    fn record(&self, written: &Poll<io::Result<usize>>) {
        match written {
            Poll::Pending => self.state.refused_bytes(),
            Poll::Ready(Ok(count)) if *count > 0 => self.state.accepted_bytes(),
            Poll::Ready(_) => {}
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Progress<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Progress<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.record(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.record(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        // hyper flushes the stream only when its own buffer is empty.
        let mut phase = self.state.phase();
        if matches!(*phase, Phase::Flushing(_)) && self.state.unread.load(SeqCst) == 0 {
            *phase = Phase::Idle(Instant::now());
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn connection_is_not_replaced_before_its_response_is_sent() {
        const LONG: Duration = Duration::from_secs(60);
        let body = || async { "x".repeat(100_000) };
        let state = Arc::new(State::new());
        let connection = Connection {
            app: Router::new().route("/", get(body)),
            peer: ([127, 0, 0, 1], 1).into(),
            state: Arc::clone(&state),
            shared: Shared {
                client_timeout: LONG,
                idle_timeout: LONG,
                drain: LONG,
                stop: Stop::default(),
            },
        };
        let (mut client, server) = duplex(1_024);
        let stream = Progress {
            stream: server,
            state: Arc::clone(&state),
        };
        let serving = tokio::spawn(async move { connection.serve(stream).await });
        let request = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        client.write_all(request).await.unwrap();
        let mut answer = vec![0; 500];
        client.read_exact(&mut answer).await.unwrap();
        // hyper has the rest of the response in its buffer.
        assert_eq!(state.rank(Instant::now()), None);
        state.replace();
        client.read_to_end(&mut answer).await.unwrap();
        let end = answer.iter().rev().take_while(|byte| **byte == b'x');
        assert_eq!(end.count(), 100_000);
        serving.await.unwrap();
    }
}
