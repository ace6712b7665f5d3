//! An issuer as a service, and its calls.

use axum::Router;
use tower_fence::{issuer, lease::Operate};

use crate::support::http::{Answer, Server};

pub async fn start<L: Operate + Clone>(leases: L) -> Server {
    Server::start(Router::new().nest("/locks", issuer::router(leases))).await
}

impl Server {
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
