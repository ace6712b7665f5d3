//! The relay: sends the events, oldest first, while it has the lease.

use std::{error::Error, time::Duration};

use axum::http::StatusCode;
use serde_json::json;
use sqlx::{PgPool, Postgres};
use tokio::time::sleep;
use tower_fence::{
    Fence,
    client::{Holder, LeaseGuard},
    lease::PostgresLeases,
};

use crate::{STREAM, shop};

/// How many events are read at a time.
const BATCH: i64 = 20;

/// How long nobody looks, where there was nothing to send.
const IDLE: Duration = Duration::from_millis(50);

pub async fn run(
    fence: Fence<Postgres>,
    subscriber: &str,
    ttl: Duration,
    pace: Duration,
) -> Result<(), Box<dyn Error>> {
    let pool = fence.get_pool().clone();
    sqlx::raw_sql(shop::TABLES).execute(&pool).await?;
    let relay = Relay {
        pool,
        client: reqwest::Client::builder()
            .timeout(Duration::from_secs(10))
            .build()?,
        url: format!("{subscriber}/{STREAM}"),
        pace,
    };
    let holder = Holder::new(PostgresLeases::new(fence))
        .ttl(ttl)
        .wait(Duration::from_secs(30));
    loop {
        relay.say("waits for the lease");
        let outcome = match holder.acquire(STREAM).await {
            Ok(lease) => relay.work(lease).await,
            Err(error) => Err(error.into()),
        };
        if let Err(error) = outcome {
            relay.say(format!("stops: {error}"));
            sleep(IDLE).await;
        }
    }
}

struct Relay {
    pool: PgPool,
    client: reqwest::Client,
    url: String,
    pace: Duration,
}

type Lease = LeaseGuard<PostgresLeases>;

impl Relay {
    /// Sends until the lease is lost, or something fails.
    async fn work(&self, lease: Lease) -> Result<(), Box<dyn Error>> {
        self.say(format!("has the lease, with token {}", lease.token()));
        // A fenced read: from its answer on, nobody older is heard. Only then is it known what is left to send.
        let hello = self.client.get(&self.url).headers(lease.headers());
        let (status, body) = answer(hello).await?;
        lease.observe(status, body.as_bytes())?;
        loop {
            let events: Vec<(i64, String, i64)> =
                sqlx::query_as("SELECT id, sku, cents FROM outbox ORDER BY id LIMIT $1")
                    .bind(BATCH)
                    .fetch_all(&self.pool)
                    .await?;
            if events.is_empty() {
                lease.check()?;
                sleep(IDLE).await;
            }
            for (id, sku, cents) in events {
                sleep(self.pace).await;
                self.send(&lease, id, &sku, cents).await?;
                let sent = sqlx::query("DELETE FROM outbox WHERE id = $1");
                sent.bind(id).execute(&self.pool).await?;
            }
        }
    }

    async fn send(
        &self,
        lease: &Lease,
        id: i64,
        sku: &str,
        cents: i64,
    ) -> Result<(), Box<dyn Error>> {
        let event = json!({ "id": id, "sku": sku, "cents": cents });
        // It does not ask whether its lease stands: the answer might be old when the event arrives.
        let post = self.client.post(&self.url).headers(lease.headers());
        let (status, body) = answer(post.json(&event)).await?;
        self.say(format!("sends event {id}: {status}"));
        lease.observe(status, body.as_bytes())?;
        if !status.is_success() {
            return Err(format!("event {id} was not heard: {status}").into());
        }
        Ok(())
    }

    fn say(&self, what: impl AsRef<str>) {
        println!("relay {}: {}", std::process::id(), what.as_ref());
    }
}

async fn answer(request: reqwest::RequestBuilder) -> reqwest::Result<(StatusCode, String)> {
    let response = request.send().await?;
    Ok((response.status(), response.text().await?))
}
