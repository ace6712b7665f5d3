//! Ports for servers.

use std::{
    collections::HashSet,
    net::TcpListener,
    sync::{LazyLock, Mutex},
};

static RESERVED: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);

/// Returns a free port that no other caller in this process gets. The port is below the range of
/// ephemeral ports. Otherwise an outgoing connection or another listener could take it before the
/// server starts or while the server is down, and a connection could even connect to itself.
pub fn free_port() -> u16 {
    loop {
        let port = rand::random_range(20_000..32_000);
        let is_free = TcpListener::bind(("127.0.0.1", port)).is_ok();
        if is_free && RESERVED.lock().unwrap().insert(port) {
            return port;
        }
    }
}
