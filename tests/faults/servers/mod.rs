//! The servers of a run, which it may freeze, kill and lose: Postgres, PgBouncer, those of the lease store, and three
//! services.

pub mod database;
pub mod leases;
pub mod pgbouncer;
pub mod services;

/// A port below those that outgoing connections get, since a server comes back to it.
pub fn free_port() -> u16 {
    loop {
        let port = rand::random_range(20_000..32_000);
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
