//! An issuer behind a proxy, for the tests of the holder.

use std::time::Duration;

use axum::Router;
use sqlx::Sqlite;
use tower_fence::{
    client::{Holder, HttpLeases},
    issuer::Issuer,
    lease::{Leases, MemoryLeases},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    http::Server,
    lease::sku,
    proxy::Proxy,
    soon,
};

/// An issuer behind a proxy, and the store behind the issuer.
pub struct Issued {
    pub store: MemoryLeases,
    pub proxy: Proxy,
    _server: Server,
    _db: Fresh<Sqlite>,
}

impl Issued {
    pub async fn start() -> Self {
        let db = Sqlite::fresh(2).await;
        let store = MemoryLeases::new(db.fence());
        let issuer = Issuer::new(store.clone()).router();
        let server = Server::start(Router::new().nest("/locks", issuer)).await;
        Self {
            store,
            proxy: Proxy::to(server.addr).await,
            _server: server,
            _db: db,
        }
    }

    pub fn leases(&self) -> HttpLeases {
        HttpLeases::new(&format!("http://{}/locks", self.proxy.addr)).unwrap()
    }

    pub fn holder(&self, ttl_ms: u64) -> Holder<HttpLeases> {
        Holder::new(self.leases()).ttl(Duration::from_millis(ttl_ms))
    }

    pub async fn is_held(&self) -> bool {
        self.store.inspect(&sku()).await.unwrap().is_some()
    }

    pub async fn is_free_soon(&self) {
        soon!("the lease is free", !self.is_held().await);
    }
}
