//! A worker that decrements the stock of a SKU under a lease. It uses a running inventory service.
//!
//! ```text
//! cargo run --example inventory
//! cargo run --example worker -- sku-1        # in two more terminals
//! ```
//!
//! Pause the worker that holds the lease with `kill -STOP PID`. The other worker acquires the
//! lease. Resume the first worker with `kill -CONT PID`. It notices that its lease is lost, and its
//! last write is refused.
//!
//! | variable | default |
//! |---|---|
//! | `INVENTORY_URL` | `http://127.0.0.1:3000` |
//! | `TTL_MS` | 3000: the time for which a lease lasts without renewal |
//! | `PACE_MS` | 1000: the pause of the worker before each write |

use std::{env, error::Error, time::Duration};

use reqwest::{StatusCode, header::HeaderMap};
use serde_json::{Value, json};
use tower_fence::{
    client::{AcquireError, Holder, HttpLeases, LeaseGuard},
    lease::{LeaseError, Owner},
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let inventory = env::var("INVENTORY_URL").unwrap_or_else(|_| "http://127.0.0.1:3000".into());
    let sku = env::args().nth(1).unwrap_or_else(|| "sku-1".into());
    if !sku
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    {
        return Err("this example supports only SKUs of A-Z a-z 0-9 . _ -".into());
    }
    let (ttl, pace) = (
        variable_ms("TTL_MS", 3_000)?,
        variable_ms("PACE_MS", 1_000)?,
    );
    let worker = Worker {
        name: format!("worker {}", std::process::id()),
        url: format!("{inventory}/inventory/{sku}"),
        client: reqwest::Client::builder()
            .timeout(Duration::from_secs(10))
            .build()?,
        pace,
    };
    let holder = Holder::new(HttpLeases::new(&format!("{inventory}/locks"))?)
        .owner(Owner::new(&worker.name)?)
        .ttl(ttl)
        .wait(Duration::from_secs(30));

    worker.say("pause me with kill -STOP, resume me with kill -CONT");
    loop {
        worker.say("waits for the lease");
        match holder.acquire(&sku).await {
            Ok(lease) => {
                if !worker.work(lease).await? {
                    return Ok(());
                }
            }
            Err(AcquireError::Lease(
                error @ (LeaseError::Held { .. }
                | LeaseError::TooManyWaiters { .. }
                | LeaseError::Unavailable(_)),
            )) => {
                worker.say(format!("has no lease: {error}"));
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            // A retry cannot help.
            Err(error) => return Err(error.into()),
        }
    }
}

struct Worker {
    name: String,
    url: String,
    client: reqwest::Client,
    pace: Duration,
}

impl Worker {
    /// Works until the lease is lost or the stock is empty. Returns false if the stock is empty.
    async fn work(&self, lease: LeaseGuard<HttpLeases>) -> Result<bool, Box<dyn Error>> {
        self.say(format!("holds the lease, with token {}", lease.token()));
        self.fill(&lease).await?;
        loop {
            // Each write needs a new token.
            if lease.renew_with_new_token().await.is_err() {
                break;
            }
            let headers = lease.headers();
            let step = async {
                tokio::time::sleep(self.pace).await;
                self.decrement(headers).await
            };
            match lease.run(step).await {
                Ok(Err(error)) => self.say(format!("gets no answer: {error}")),
                Ok(Ok((status, body))) => {
                    self.say(format!(
                        "decrements with token {}: {status} {body}",
                        lease.token()
                    ));
                    if status == StatusCode::CONFLICT {
                        // If the release fails, the lease expires.
                        let _ = lease.release().await;
                        return Ok(false);
                    }
                    if lease.observe(status, body.to_string().as_bytes()).is_err() {
                        break;
                    }
                }
                Err(_) => break,
            }
        }
        if let Err(loss) = lease.check() {
            self.say(format!("lost its lease: {loss}"));
            // A real worker would stop here. This worker writes once more, to show that the fence
            // refuses the write.
            let (status, body) = self.decrement(lease.headers()).await?;
            self.say(format!("writes all the same: {status} {}", body["title"]));
        }
        Ok(true)
    }

    /// Sets the stock of a new SKU to 100.
    async fn fill(&self, lease: &LeaseGuard<HttpLeases>) -> Result<(), Box<dyn Error>> {
        if self.client.get(&self.url).send().await?.status() == StatusCode::NOT_FOUND {
            let put = self.client.put(&self.url).headers(lease.headers());
            let status = put.json(&json!({ "stock": 100 })).send().await?.status();
            self.say(format!("puts 100 in stock: {status}"));
        }
        Ok(())
    }

    async fn decrement(&self, headers: HeaderMap) -> reqwest::Result<(StatusCode, Value)> {
        let post = self
            .client
            .post(format!("{}/decrement", self.url))
            .headers(headers);
        let response = post.json(&json!({ "quantity": 1 })).send().await?;
        Ok((response.status(), response.json().await?))
    }

    fn say(&self, what: impl AsRef<str>) {
        println!("{} {}", self.name, what.as_ref());
    }
}

fn variable_ms(name: &str, default: u64) -> Result<Duration, Box<dyn Error>> {
    let ms = env::var(name).map_or(Ok(default), |value| {
        value
            .parse()
            .map_err(|_| format!("{name} must be a number of milliseconds"))
    })?;
    Ok(Duration::from_millis(ms))
}
