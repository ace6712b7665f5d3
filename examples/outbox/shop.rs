//! The shop, which changes prices under leases. Each change is committed in one transaction with
//! its event.

use std::{error::Error, time::Duration};

use sqlx::Postgres;
use tokio::time::sleep;
use tower_fence::{Fence, TokenUse, client::Holder, lease::PostgresLeases};

const SKUS: [&str; 3] = ["sku-1", "sku-2", "sku-3"];

/// The tables of the shop, which the relays also use. The advisory lock prevents two processes that
/// start at the same time from creating the tables concurrently.
pub const TABLES: &str = "SELECT pg_advisory_xact_lock(3100); \
    CREATE TABLE IF NOT EXISTS price (sku TEXT PRIMARY KEY, cents BIGINT NOT NULL); \
    CREATE TABLE IF NOT EXISTS outbox \
        (id BIGSERIAL PRIMARY KEY, sku TEXT NOT NULL, cents BIGINT NOT NULL)";

pub async fn run(
    fence: Fence<Postgres>,
    pace: Duration,
    changes: u64,
) -> Result<(), Box<dyn Error>> {
    sqlx::raw_sql(TABLES).execute(fence.pool()).await?;
    let holder = Holder::new(PostgresLeases::new(fence.clone())).wait(Duration::from_secs(30));
    for sku in SKUS.into_iter().cycle().take(changes as usize) {
        sleep(pace).await;
        let lease = holder.acquire(sku).await?;
        let begun = fence.begin(lease.resource(), lease.token(), TokenUse::SingleUse);
        let mut tx = begun.await?;
        let cents: i64 = sqlx::query_scalar(
            "INSERT INTO price VALUES ($1, 100) \
             ON CONFLICT (sku) DO UPDATE SET cents = price.cents + 1 RETURNING cents",
        )
        .bind(sku)
        .fetch_one(&mut *tx)
        .await?;
        // The event is inserted in the transaction that has admitted the token.
        let event = sqlx::query("INSERT INTO outbox (sku, cents) VALUES ($1, $2)");
        event.bind(sku).bind(cents).execute(&mut *tx).await?;
        tx.commit().await?;
        println!("shop: {sku} costs {cents} cents");
        // The change is committed. If the release fails, the lease expires.
        let _ = lease.release().await;
    }
    Ok(())
}
