//! The services whose consoles are tested: one in this process, and the example in another process.

use std::{any::Any, sync::LazyLock};

use axum::{Router, routing::post};
use reqwest::{Client, RequestBuilder};
use serde_json::{Value, json};
use sqlx::Sqlite;
use tower_fence::{Fence, FenceLayer, PathParam, issuer, lease::MemoryLeases};
use tower_fence_console::Events;
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};

use crate::support::{
    database::{Fresh, TestDatabase},
    http::{Answer, Server},
    process::Inventory,
};

/// Returns the events of this process, which include those of concurrent tests.
pub fn events() -> Events {
    static EVENTS: LazyLock<Events> = LazyLock::new(|| {
        let events = Events::new();
        tracing_subscriber::registry().with(events.layer()).init();
        events
    });
    EVENTS.clone()
}

/// A service in this process.
pub struct Service<DB: TestDatabase> {
    pub server: Server,
    pub fence: Fence<DB>,
    pub leases: MemoryLeases,
    _db: Fresh<DB>,
}

impl<DB: TestDatabase> Service<DB> {
    pub async fn start() -> Self {
        let db = DB::fresh(4).await;
        let fence = db.fence();
        let leases = MemoryLeases::new(fence.clone());
        let write = FenceLayer::new(fence.clone(), PathParam("name"));
        let app = Router::new()
            .route("/write/{name}", post(async || "written"))
            .route_layer(write)
            .nest("/locks", issuer::router(leases.clone()))
            .nest_service(
                "/ops/console",
                tower_fence_console::router(fence.clone(), leases.clone(), events()),
            );
        let server = Server::start(app).await;
        Self {
            server,
            fence,
            leases,
            _db: db,
        }
    }

    pub async fn get(&self, path: &str) -> Answer {
        Answer::to(self.server.get(&format!("/ops/console/{path}"))).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        let path = format!("/ops/console/{path}");
        Answer::to(self.server.post(&path).json(&body)).await
    }
}

pub type OnSqlite = Service<Sqlite>;

/// The example, with a client.
pub struct Example {
    pub service: Inventory,
    pub client: Client,
    /// The database, if the test has created it.
    _db: Option<Box<dyn Any>>,
}

impl Example {
    pub async fn start() -> Self {
        Self::with(&[]).await
    }

    pub async fn with(variables: &[(&str, &str)]) -> Self {
        Self {
            service: Inventory::start(variables).await,
            client: Client::new(),
            _db: None,
        }
    }

    /// Starts the example over a new database. With Postgres, the database also stores the leases.
    /// With SQLite, the leases are in the memory of the process.
    pub async fn over<DB: TestDatabase>() -> Self {
        let db = DB::fresh(1).await;
        let mut example = Self::with(&[("DATABASE_URL", &db.url)]).await;
        example._db = Some(Box::new(db));
        example
    }

    pub fn console(&self) -> String {
        self.service.url("/console/")
    }

    pub fn lock(&self, name: &str) -> String {
        // The name is escaped as one path segment.
        let mut url = reqwest::Url::parse(&self.service.url("/locks")).unwrap();
        url.path_segments_mut().unwrap().push(name);
        url.into()
    }

    pub fn ask(&self, name: &str, body: Value) -> RequestBuilder {
        self.client.post(self.lock(name)).json(&body)
    }

    /// Acquires a lease. Returns the body of the response, with `fencing_token` and `lease_id`.
    pub async fn acquire(&self, name: &str, owner: &str, ttl_ms: u64) -> Value {
        let body = json!({ "owner": owner, "ttl_ms": ttl_ms });
        let answer = Answer::to(self.ask(name, body)).await;
        assert_eq!(answer.status, 201, "{answer:?}");
        answer.json()
    }

    pub async fn release(&self, lease: &Value) {
        let name = lease["resource"].as_str().unwrap();
        let request = self.client.delete(self.lock(name));
        let request = request.header("Lease-Id", lease["lease_id"].as_str().unwrap());
        assert_eq!(Answer::to(request).await.status, 204);
    }

    /// Sets the stock under a lease.
    pub async fn write(&self, lease: &Value, stock: u32) -> Answer {
        let token = lease["fencing_token"].as_str().unwrap();
        self.write_with(lease["resource"].as_str().unwrap(), token, stock)
            .await
    }

    /// Checks that a write is refused with this problem, and returns the body of the response.
    pub async fn refuses(&self, lease: &Value, stock: u32, status: u16, name: &str) -> Value {
        self.write(lease, stock).await.is_problem(status, name)
    }

    pub async fn write_with(&self, name: &str, token: &str, stock: u32) -> Answer {
        let mut url = reqwest::Url::parse(&self.service.url("/inventory")).unwrap();
        url.path_segments_mut().unwrap().push(name);
        let request = self.client.put(url).header("Fencing-Token", token);
        Answer::to(request.json(&json!({ "stock": stock }))).await
    }

    /// Returns two leases on a resource. The first one was broken, so its token is stale after the
    /// second grant.
    pub async fn late_holder(&self, name: &str) -> (Value, Value) {
        let first = self.acquire(name, "worker-a", 60_000).await;
        let body = json!({ "resource": name, "token": first["token"] });
        let url = self.service.url("/console/api/break");
        assert_eq!(
            Answer::to(self.client.post(url).json(&body)).await.status,
            204
        );
        let second = self.acquire(name, "worker-b", 60_000).await;
        (first, second)
    }
}
