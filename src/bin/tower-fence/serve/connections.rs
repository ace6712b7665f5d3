//! Connections: how many there may be, how long a slow client may take, and how they end.
//!
//! HTTP/1.1, with keep-alive. The head of a request has 16 KiB at most; the issuer bounds its body, in length and in time.

use std::{sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
    service::TowerToHyperService,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_io_timeout::TimeoutStream;

use super::{args::LimitArgs, metrics::Open, stop::Stop, tls::Tls};

/// The greatest length of the head of a request.
const HEAD_LIMIT_BYTES: usize = 16 * 1024;
/// Files beside the connections: those of the stores, of the log, and of the runtime.
const OTHER_FILES: u64 = 200;

pub struct Connections {
    free: Arc<Semaphore>,
    client_timeout: Duration,
    tls: Option<Tls>,
}

impl Connections {
    pub fn new(limits: &LimitArgs, tls: Option<Tls>) -> Self {
        let files = raise_file_limit();
        let wanted = u64::from(limits.max_connections);
        let free = wanted.min(files.saturating_sub(OTHER_FILES).max(1));
        if free < wanted {
            tracing::warn!(
                wanted,
                free,
                "fewer connections than wanted: the process may open no more files"
            );
        }
        Self {
            free: Arc::new(Semaphore::new(free as usize)),
            client_timeout: limits.client_timeout,
            tls,
        }
    }

    /// Serves until the signal to stop; then until the requests under way are answered, for `drain` at most.
    pub async fn serve(self, listener: TcpListener, app: Router, stop: Stop, drain: Duration) {
        let connections = GracefulShutdown::new();
        loop {
            let next = async {
                let permit = Arc::clone(&self.free).acquire_owned().await;
                (permit, listener.accept().await)
            };
            let (permit, accepted) = tokio::select! {
                next = next => next,
                () = stop.begun() => break,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    // Where there are no files left, some have to be closed first.
                    sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let connection = Connection {
                app: app.clone(),
                watcher: connections.watcher(),
                client_timeout: self.client_timeout,
            };
            let tls = self.tls.clone();
            tokio::spawn(async move {
                let (_permit, _open) = (permit, Open::count());
                connection.begin(stream, tls).await;
            });
        }
        drop(listener);
        // What a request was answered at the end of the time has to be sent, too.
        let limit = drain + Duration::from_secs(1);
        if timeout(limit, connections.shutdown()).await.is_err() {
            tracing::warn!("some connections did not end in time");
        }
    }
}

struct Connection {
    app: Router,
    watcher: Watcher,
    client_timeout: Duration,
}

impl Connection {
    async fn begin(self, stream: TcpStream, tls: Option<Tls>) {
        _ = stream.set_nodelay(true);
        let Some(tls) = tls else {
            return self.serve(stream).await;
        };
        match timeout(self.client_timeout, tls.acceptor().accept(stream)).await {
            Ok(Ok(stream)) => self.serve(stream).await,
            Ok(Err(error)) => tracing::debug!(%error, "no TLS handshake"),
            Err(_) => tracing::debug!("no TLS handshake in time"),
        }
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let mut stream = TimeoutStream::new(stream);
        // Who does not read its answer; who does not write is the business of the lines below.
        stream.set_write_timeout(Some(self.client_timeout));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.client_timeout)
            .max_buf_size(HEAD_LIMIT_BYTES)
            .serve_connection(
                TokioIo::new(Box::pin(stream)),
                TowerToHyperService::new(self.app),
            );
        if let Err(error) = self.watcher.watch(connection).await {
            tracing::debug!(%error, "a connection has ended early");
        }
    }
}

/// Raises the number of files that the process may open to the most that it is allowed, and returns it.
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
