//! A server on a real socket, and the requests of the tests to it.

use std::net::SocketAddr;

use axum::{Router, routing::MethodRouter};
use reqwest::{Client, ClientBuilder, RequestBuilder, Response};
use serde_json::Value;
use tokio::{net::TcpListener, task::JoinHandle};
use tower_fence::{issuer, lease::LeaseAdmin, problem::ProblemType};

/// Returns a builder of a client. The tests of the program enable TLS in reqwest, which then
/// requires an installed crypto provider.
pub fn client_builder() -> ClientBuilder {
    #[cfg(feature = "program")]
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder()
}

pub fn client() -> Client {
    client_builder().build().unwrap()
}

/// An axum server in this process. It runs until it is dropped.
pub struct Server {
    pub addr: SocketAddr,
    pub client: Client,
    task: JoinHandle<()>,
}

impl Server {
    pub async fn start(app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self {
            addr,
            client: client(),
            task,
        }
    }

    /// Starts a server that has one route.
    pub async fn at(path: &str, route: MethodRouter) -> Self {
        Self::start(Router::new().route(path, route)).await
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    pub fn post(&self, path: &str) -> RequestBuilder {
        self.client.post(self.url(path))
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(self.url(path))
    }

    /// Sends a POST with a token and without a body.
    pub async fn write(&self, path: &str, token: impl ToString) -> Answer {
        let request = self.post(path).header("Fencing-Token", token.to_string());
        Answer::to(request).await
    }

    /// Checks that a write is refused with this problem, and returns the body of the response.
    pub async fn refuses(
        &self,
        path: &str,
        token: impl ToString,
        status: u16,
        name: &str,
    ) -> Value {
        self.write(path, token).await.is_problem(status, name)
    }

    /// Starts an issuer under `/locks`.
    pub async fn issuer<L: LeaseAdmin + Clone>(leases: L) -> Self {
        Self::start(Router::new().nest("/locks", issuer::router(leases))).await
    }

    pub async fn acquire(&self, path: &str, body: serde_json::Value) -> Answer {
        Answer::to(self.post(path).json(&body)).await
    }

    pub async fn renew(&self, path: &str, id: &str, body: serde_json::Value) -> Answer {
        let request = self.client.put(self.url(path)).header("Lease-Id", id);
        Answer::to(request.json(&body)).await
    }

    pub async fn release(&self, path: &str, id: &str) -> Answer {
        Answer::to(self.client.delete(self.url(path)).header("Lease-Id", id)).await
    }

    pub async fn inspect(&self, path: &str) -> serde_json::Value {
        let answer = Answer::to(self.get(path)).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.headers["cache-control"], "no-store");
        answer.json()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A complete response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
}

impl Answer {
    pub async fn to(request: RequestBuilder) -> Self {
        Self::read(request.send().await.unwrap()).await
    }

    pub async fn read(response: Response) -> Self {
        Self {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            text: response.text().await.unwrap(),
        }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("not JSON: {self:?}"))
    }

    /// Whether the request had no effect because no connection became available in time. This can
    /// happen on a busy machine.
    pub fn is_busy(&self) -> bool {
        let nothing_done = ["store-unavailable", "fence-busy"];
        self.status == 503 && nothing_done.iter().any(|name| self.text.contains(name))
    }

    /// Checks that this answer is the problem `name` with this status, in the documented form.
    /// Returns the body.
    #[track_caller]
    pub fn is_problem(&self, status: u16, name: &str) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.headers["content-type"], "application/problem+json");
        assert_eq!(self.headers["cache-control"], "no-store");
        let body = self.json();
        let ours = ProblemType::ALL.iter().find(|kind| kind.name() == name);
        let uri = match ours {
            Some(kind) => kind.uri().to_owned(),
            // The example service defines this problem type.
            None => format!("https://example.com/problems/{name}"),
        };
        assert_eq!(body["type"], uri, "{self:?}");
        assert_eq!(body["status"], status);
        assert!(body["title"].is_string());
        body
    }
}

/// Checks the field `ttl_ms` of a lease, and removes the field. A quorum returns the remaining
/// time, which is less than the requested time.
#[track_caller]
pub fn lasts_ms(lease: &mut Value, asked: u64) {
    let ttl = lease["ttl_ms"].take().as_u64().unwrap();
    assert!(ttl <= asked && ttl > asked * 9 / 10, "{ttl}");
}
