//! Ports for servers.

use std::{
    collections::HashSet,
    net::TcpListener,
    sync::{LazyLock, Mutex},
};

static HANDED_OUT: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);

/// A port on which nothing listens, and which nobody else in this process is told of. It is below those that outgoing
/// connections and listeners without a port of their own get, one of which could otherwise take it before the server is
/// up, while it is away, or even connect to itself.
pub fn free_port() -> u16 {
    loop {
        let port = rand::random_range(20_000..32_000);
        let is_free = TcpListener::bind(("127.0.0.1", port)).is_ok();
        if is_free && HANDED_OUT.lock().unwrap().insert(port) {
            return port;
        }
    }
}
