//! A paused holder and its successor, with tokio-postgres.
//!
//! ```text
//! export DATABASE_URL=postgres://localhost/shop
//! cargo run --example inventory              # the issuer, which creates the tables and functions
//! cargo run -p example-tokio-postgres          # in another terminal
//! ```
//!
//! `ISSUER_URL` is the address of the issuer. Default: `http://127.0.0.1:3000/locks`.

use std::{env, error::Error, time::Duration};

use tokio_postgres::{Client, NoTls, error::DbError};
use tower_fence::{
    Resource, Token,
    client::HttpLeases,
    lease::{Acquire, Leases},
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let database = env::var("DATABASE_URL")?;
    let issuer = env::var("ISSUER_URL").unwrap_or_else(|_| "http://127.0.0.1:3000/locks".into());
    let (mut client, connection) = tokio_postgres::connect(&database, NoTls).await?;
    tokio::spawn(connection);
    let leases = HttpLeases::new(&issuer)?;
    let sku = Resource::new("sku-1")?;
    let short = Acquire::new(Duration::from_millis(500)).wait(Duration::from_secs(5));
    let long = Acquire::new(Duration::from_secs(30)).wait(Duration::from_secs(5));

    let first = leases.acquire(&sku, short).await?.token;
    println!("holder 1 leases sku-1 with token {first}, counts 100, and is paused");

    // The request waits in the queue until the lease of holder 1 has expired.
    let lease = leases.acquire(&sku, long).await?;
    let second = lease.token;
    println!("holder 2 leases sku-1 with token {second}, counts 96, and writes that");
    set_stock(&mut client, &sku, second, 96).await?;
    leases.release(&sku, &lease.id).await?;

    println!("holder 1 wakes up, and writes its 100");
    let Err(error) = set_stock(&mut client, &sku, first, 100).await else {
        return Err("holder 1 has written over holder 2".into());
    };
    let Some(refusal) = refusal(&error) else {
        return Err(error.into());
    };
    println!("refused: {} {}", refusal.code().code(), refusal.message());
    println!("{}", refusal.detail().unwrap_or_default());

    let stock = "SELECT stock FROM inventory WHERE sku = $1";
    let stock: i64 = client.query_one(stock, &[&sku.as_str()]).await?.get(0);
    println!("the stock is {stock}");
    Ok(())
}

/// Checks the token and writes in one transaction. After a refusal, the transaction is dropped and
/// therefore rolled back.
async fn set_stock(
    client: &mut Client,
    sku: &Resource,
    token: Token,
    stock: i64,
) -> Result<(), tokio_postgres::Error> {
    let sku = sku.as_str();
    let tx = client.transaction().await?;
    let timeouts = "SET LOCAL lock_timeout = '5s'; \
                    SET LOCAL idle_in_transaction_session_timeout = '15s'; \
                    SET LOCAL client_connection_check_interval = '1s'";
    tx.batch_execute(timeouts).await?;
    tx.execute("SELECT tower_fence.admit($1, $2)", &[&sku, &token.get()])
        .await?;
    let set = "INSERT INTO inventory (sku, stock) VALUES ($1, $2)
               ON CONFLICT (sku) DO UPDATE SET stock = excluded.stock";
    tx.execute(set, &[&sku, &stock]).await?;
    tx.commit().await
}

/// Returns the error of Postgres for a stale token. Its detail is the problem document.
fn refusal(error: &tokio_postgres::Error) -> Option<&DbError> {
    let error = error.as_db_error()?;
    (error.code().code() == "TF412").then_some(error)
}
