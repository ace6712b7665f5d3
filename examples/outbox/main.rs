//! An outbox: a fenced write stores an event in its own transaction, and a relay under a lease
//! sends the events. The receiver of the events has a fence that refuses stale relays.
//!
//! ```text
//! export DATABASE_URL=postgres://localhost/shop
//! cargo run --example outbox -- subscriber   # receives prices
//! cargo run --example outbox -- relay        # in two more terminals: one works, one waits
//! cargo run --example outbox -- shop         # changes prices
//! ```
//!
//! Pause the active relay with `kill -STOP PID`. The other relay acquires the lease. Resume the
//! first relay with `kill -CONT PID`. The subscriber refuses its next event, and the relay joins
//! the queue again.
//!
//! | variable | default |
//! |---|---|
//! | `DATABASE_URL` | required: a Postgres database. The subscriber may use another one |
//! | `SUBSCRIBER_ADDR` | `127.0.0.1:3100`: the address on which the subscriber listens |
//! | `TTL_MS` | 3000: the time for which a relay's lease lasts without renewal |
//! | `PACE_MS` | 200: the pause of a relay before each event, and of the shop before each change |
//! | `CHANGES` | 1000: the number of price changes |
//!
//! # Guarantees and limits
//!
//! 1. **A price and its event are written together or not at all.** One transaction writes both,
//!    after it has admitted the token of the shop's lease. If a writer is refused, there is no
//!    event.
//! 2. **The events of one SKU are received in the order of its writes.** The transaction holds the
//!    fence's row lock until its commit. The writes of one SKU therefore commit one after the
//!    other, and their ids are in the same order. Ids of different SKUs may become visible out of
//!    order. If a relay stored only the highest id, it would miss events. The relay therefore
//!    deletes each event that it has sent.
//! 3. **A paused relay cannot deliver events after its successor has started.** The successor's
//!    first request makes all lower tokens stale at the subscriber. Only then does the successor
//!    read the remaining events.
//! 4. **The last event of a SKU may be received twice** (at-least-once delivery). This happens if a
//!    relay crashes or is paused between sending an event and deleting it, or if it does not get
//!    the response. No other event of that SKU is received in between, so a subscriber that stores
//!    the last id of each SKU can detect the repeated event. Effects outside the subscriber's
//!    transaction (an email, a call) may be repeated.
//! 5. **An event that the subscriber refuses** delays only the events of its own SKU. The relay
//!    logs the event and retries it after a pause, which grows from 0.25 s to one minute.

mod relay;
mod shop;
mod subscriber;

use std::{env, error::Error, time::Duration};

use sqlx::PgPool;
use tower_fence::Fence;

/// The resource of the subscriber's fence and of the relays' lease.
const STREAM: &str = "prices";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let url = env::var("DATABASE_URL").map_err(
        |_| "DATABASE_URL is not set: use a Postgres URL such as postgres://localhost/shop",
    )?;
    let pool = PgPool::connect(&url).await?;
    let fence = Fence::new(pool);
    fence.migrate().await?;
    let subscriber = env::var("SUBSCRIBER_ADDR").unwrap_or_else(|_| "127.0.0.1:3100".into());
    let pace = Duration::from_millis(variable("PACE_MS", 200)?);
    match env::args().nth(1).as_deref() {
        Some("shop") => shop::run(fence, pace, variable("CHANGES", 1000)?).await,
        Some("relay") => {
            let ttl = Duration::from_millis(variable("TTL_MS", 3_000)?);
            relay::run(fence, &format!("http://{subscriber}"), ttl, pace).await
        }
        Some("subscriber") => subscriber::run(fence, &subscriber).await,
        _ => Err("usage: outbox shop | relay | subscriber".into()),
    }
}

fn variable(name: &str, default: u64) -> Result<u64, String> {
    env::var(name).map_or(Ok(default), |value| {
        let number = value.parse();
        number.map_err(|_| format!("{name} must be a whole number"))
    })
}
