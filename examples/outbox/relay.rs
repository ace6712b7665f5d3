//! The relay, which sends the events in the order of their ids while it holds the lease.

use std::{collections::HashMap, error::Error, time::Duration};

use axum::http::StatusCode;
use serde_json::json;
use sqlx::{PgPool, Postgres};
use tokio::time::{Instant, sleep};
use tower_fence::{
    Fence,
    client::{AcquireError, Holder, LeaseGuard},
    lease::{LeaseError, PostgresLeases},
};

use crate::{STREAM, shop};

/// The maximum number of events in one read.
const BATCH: i64 = 20;

/// The pause after a read that returns no events.
const IDLE: Duration = Duration::from_millis(50);

/// The shortest and the longest pause after a refusal or a failure. Each pause is twice as long as
/// the previous one.
const SHORTEST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

pub async fn run(
    fence: Fence<Postgres>,
    subscriber: &str,
    ttl: Duration,
    pace: Duration,
) -> Result<(), Box<dyn Error>> {
    let pool = fence.pool().clone();
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
    let mut pause = SHORTEST_PAUSE;
    loop {
        relay.say("waits for the lease");
        let mut sent = 0;
        let outcome = match holder.acquire(STREAM).await {
            Ok(lease) => relay.work(lease, &mut sent).await,
            // Another relay has the lease. This is not a failure, so no pause delays a failover.
            Err(AcquireError::Lease(LeaseError::Held { .. })) => continue,
            Err(error) => Err(error.into()),
        };
        if let Err(error) = outcome {
            relay.say(format!("stops: {error}"));
            if sent > 0 {
                pause = SHORTEST_PAUSE;
            }
            sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
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

/// The retry state of a SKU whose event was refused.
struct Refused {
    pause: Duration,
    until: Instant,
}

impl Relay {
    /// Sends events until the lease is lost or an error occurs.
    async fn work(&self, lease: Lease, sent: &mut u64) -> Result<(), Box<dyn Error>> {
        self.say(format!("has the lease, with token {}", lease.token()));
        // This fenced read makes all lower tokens stale at the subscriber. Before this read, an
        // earlier relay could still send events.
        let hello = self.client.get(&self.url).headers(lease.headers());
        let (status, body) = answer(hello).await?;
        lease.observe(status, body.as_bytes())?;
        if !status.is_success() {
            return Err(format!("the subscriber answers the first read with {status}").into());
        }
        let mut refused: HashMap<String, Refused> = HashMap::new();
        loop {
            let now = Instant::now();
            let delayed = refused.iter().filter(|(_, refused)| refused.until > now);
            let delayed: Vec<_> = delayed.map(|(sku, _)| sku.clone()).collect();
            let events: Vec<(i64, String, i64)> = sqlx::query_as(
                "SELECT id, sku, cents FROM outbox WHERE sku <> ALL ($1) ORDER BY id LIMIT $2",
            )
            .bind(delayed)
            .bind(BATCH)
            .fetch_all(&self.pool)
            .await?;
            if events.is_empty() {
                lease.check()?;
                sleep(IDLE).await;
            }
            for (id, sku, cents) in events {
                sleep(self.pace).await;
                let status = self.send(&lease, id, &sku, cents).await?;
                if status.is_success() {
                    let delete = sqlx::query("DELETE FROM outbox WHERE id = $1");
                    delete.bind(id).execute(&self.pool).await?;
                    refused.remove(&sku);
                    *sent += 1;
                } else {
                    let before = refused.get(&sku).map(|refused| refused.pause);
                    let pause = before.map_or(SHORTEST_PAUSE, |before| 2 * before);
                    let pause = pause.min(LONGEST_PAUSE);
                    self.say(format!(
                        "event {id} of {sku} is refused: {status}; retries it in {pause:?}"
                    ));
                    let until = Instant::now() + pause;
                    refused.insert(sku, Refused { pause, until });
                    // The rest of the batch may contain later events of this SKU. The next query
                    // omits them, or returns them after this event.
                    break;
                }
            }
        }
    }

    async fn send(
        &self,
        lease: &Lease,
        id: i64,
        sku: &str,
        cents: i64,
    ) -> Result<StatusCode, Box<dyn Error>> {
        let event = json!({ "id": id, "sku": sku, "cents": cents });
        // A check of the lease before sending would be useless, because its result could be out of
        // date when the event arrives.
        let post = self.client.post(&self.url).headers(lease.headers());
        let (status, body) = answer(post.json(&event)).await?;
        self.say(format!("sends event {id}: {status}"));
        lease.observe(status, body.as_bytes())?;
        Ok(status)
    }

    fn say(&self, what: impl AsRef<str>) {
        println!("relay {}: {}", std::process::id(), what.as_ref());
    }
}

async fn answer(request: reqwest::RequestBuilder) -> reqwest::Result<(StatusCode, String)> {
    let response = request.send().await?;
    Ok((response.status(), response.text().await?))
}
