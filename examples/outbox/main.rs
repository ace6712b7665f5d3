//! An outbox: a fenced write and its event in one transaction, and a relay that runs under a lease
//! and is itself fenced by the receiver of the events.
//!
//! ```text
//! export DATABASE_URL=postgres://localhost/shop
//! cargo run --example outbox -- subscriber   # receives prices
//! cargo run --example outbox -- relay        # in two more terminals: one works, one waits
//! cargo run --example outbox -- shop         # changes prices
//! ```
//!
//! Pause the active relay with `kill -STOP PID`, watch the other one take over, and resume the
//! first with `kill -CONT PID`. The subscriber refuses its event, and the relay joins the queue
//! again.
//!
//! | variable | default |
//! |---|---|
//! | `DATABASE_URL` | required: a Postgres database. The subscriber may use another one |
//! | `SUBSCRIBER_ADDR` | `127.0.0.1:3100`: where the subscriber listens and the relays send the events |
//! | `TTL_MS` | 3000: how long the lease of a relay lasts without renewal |
//! | `PACE_MS` | 200: the pause of a relay before each event, and of the shop before each change |
//! | `CHANGES` | 1000: the number of price changes |
//!
//! # Guarantees and limits
//!
//! 1. **A price and its event are written together or not at all.** They are one transaction, in
//!    which the token of the shop's lease was admitted. A writer that is refused leaves no event.
//! 2. **The events of one SKU are received in the order of its writes.** The fence's row lock is
//!    held until the commit, so the writes of one SKU commit one after the other, and their ids are
//!    in the same order. Ids of different SKUs may become visible out of order. A relay that kept
//!    the highest id would miss some events, so the relay deletes the events that it has sent.
//! 3. **A relay that was paused cannot deliver events once its successor has begun.** The
//!    successor's first request makes all lower tokens stale at the subscriber, before the
//!    successor reads the events that are left.
//! 4. **The last event of a SKU may be received twice** (at least once). This happens if a relay
//!    crashes or is paused between sending an event and deleting it, or does not get the answer. No
//!    other event of that SKU was received in between, so a subscriber that stores the last id of
//!    each SKU can detect it. Effects outside of the subscriber's transaction (a mail, a call) may
//!    be repeated.
//! 5. **An event that the subscriber refuses** delays the events of its SKU, but no others. The
//!    relay logs the event and retries it after a pause, which grows from 0.25 s to a minute.

mod relay;
mod shop;
mod subscriber;

use std::{env, error::Error, time::Duration};

use sqlx::PgPool;
use tower_fence::Fence;

/// The resource of the subscriber's fence, and of the relays' lease.
const STREAM: &str = "prices";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
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
        number.map_err(|_| format!("{name} is a whole number"))
    })
}
