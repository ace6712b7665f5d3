//! The server: axum, in this process.

use std::net::SocketAddr;

use axum::{Router, serve::ListenerExt};
use tokio::{net::TcpListener, runtime::Runtime};

/// Creates a runtime with two workers, as on a machine with two cores.
pub fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// Serves until the process ends.
pub fn serve(runtime: &Runtime, app: Router) -> SocketAddr {
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"));
    let listener = listener.expect("a free port");
    let addr = listener.local_addr().expect("an address");
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    runtime.spawn(async move { axum::serve(listener, app).await });
    addr
}
