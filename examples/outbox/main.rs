//! An outbox: a fenced write and its event in one transaction, and a relay that is itself under a lease, and fenced by
//! who hears the events.
//!
//! ```text
//! export DATABASE_URL=postgres://localhost/shop
//! cargo run --example outbox -- subscriber   # hears of prices
//! cargo run --example outbox -- relay        # in two more terminals: one works, one waits
//! cargo run --example outbox -- shop         # changes prices
//! ```
//!
//! Freeze the relay that works with `kill -STOP PID`, watch the other one take over, and have the first go on with
//! `kill -CONT PID`: the subscriber refuses what it sends, and it gets in line again.
//!
//! | variable | default |
//! |---|---|
//! | `DATABASE_URL` | none: a Postgres. The subscriber may have one of its own |
//! | `SUBSCRIBER_ADDR` | `127.0.0.1:3100`: where the subscriber listens, and the relays send to |
//! | `TTL_MS` | 3000: how long the lease of a relay lasts without renewal |
//! | `PACE_MS` | 200: how long a relay thinks before it sends an event, and the shop before it changes a price |
//! | `CHANGES` | 1000: how often the shop changes a price |
//!
//! # What is certain, and what is not
//!
//! 1. **A price and its event are written together or not at all**: they are one transaction, in which the token of the
//!    shop's lease was admitted. A writer that is refused leaves no event.
//! 2. **Events of one SKU are heard in the order of its writes.** The fence's row lock, held until the commit, makes
//!    those of one SKU commit one after the other, so their ids go up as well. Ids of different SKUs may appear out of
//!    order: whoever remembered the highest id would miss some, so a relay deletes what it has sent.
//! 3. **A relay that was paused sends nothing more**, once its successor has begun: the successor's first request kills
//!    all older tokens at the subscriber, before it looks at what is left to send.
//! 4. **The last event of a SKU may be heard once more** (at least once): where a relay dies or is paused between sending
//!    an event and deleting it, or does not get the answer. No other event of that SKU was heard in between, so a subscriber
//!    that keeps the last id of each SKU can tell. What a subscriber does outside of its transaction (a mail, a call) it
//!    may do again.
//! 5. **An event that the subscriber refuses** delays the events of its SKU and no others. The relay logs the event and
//!    retries it after a pause, which grows from 0.25 s to a minute.

mod relay;
mod shop;
mod subscriber;

use std::{env, error::Error, time::Duration};

use sqlx::PgPool;
use tower_fence::Fence;

/// What events are about; the lease of the relays, and what the subscriber fences.
const STREAM: &str = "prices";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("DATABASE_URL").map_err(
        |_| "DATABASE_URL is not set: it names a Postgres, as postgres://localhost/shop does",
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
        _ => Err("outbox shop, outbox relay, or outbox subscriber".into()),
    }
}

fn variable(name: &str, default: u64) -> Result<u64, String> {
    env::var(name).map_or(Ok(default), |value| {
        let number = value.parse();
        number.map_err(|_| format!("{name} is a whole number"))
    })
}
