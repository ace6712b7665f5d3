//! The example service on Postgres and Redis, and its client.

use reqwest::Client;
use serde_json::{Value, json};
use sqlx::Postgres;

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    http::Answer,
    process::Inventory,
    redis::RedisServer,
};

/// Starts a service on Postgres and Redis. Returns the service, the database, and the Redis server.
pub async fn on_servers() -> (Inventory, Fresh<Postgres>, RedisServer) {
    let (db, redis) = (Postgres::fresh(2).await, RedisServer::start(&[]).await);
    let variables = [
        ("DATABASE_URL", db.url.as_str()),
        ("REDIS_URL", &redis.url()),
    ];
    (Inventory::start(&variables).await, db, redis)
}

pub struct Caller<'a> {
    service: &'a Inventory,
    pub client: Client,
}

impl<'a> Caller<'a> {
    pub fn of(service: &'a Inventory) -> Self {
        Self {
            service,
            client: Client::new(),
        }
    }

    /// Acquires as soon as the lock is free, and returns the header value.
    pub async fn acquire(&self, sku: &str, ttl_ms: u64) -> String {
        let mut granted = String::new();
        eventually("the lock is granted", async || {
            let request = self.client.post(self.service.url(&format!("/locks/{sku}")));
            let answer = Answer::to(request.json(&json!({ "ttl_ms": ttl_ms }))).await;
            if answer.status == 201 {
                granted = answer.json()["fencing_token"].as_str().unwrap().to_owned();
            }
            answer.status == 201
        })
        .await;
        granted
    }

    pub async fn set(&self, sku: &str, stock: i64) {
        let token = self.acquire(sku, 100).await;
        let request = self
            .client
            .put(self.service.url(&format!("/inventory/{sku}")));
        let request = request
            .header("Fencing-Token", token)
            .json(&json!({ "stock": stock }));
        let answer = Answer::to(request).await;
        assert_eq!(answer.json(), json!({ "sku": sku, "stock": stock }));
    }

    pub async fn decrement(&self, sku: &str, token: &str, body: Value) -> Answer {
        let path = format!("/inventory/{sku}/decrement");
        let request = self.client.post(self.service.url(&path));
        Answer::to(request.header("Fencing-Token", token).json(&body)).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        Answer::to(self.client.get(self.service.url(path))).await
    }
}
