//! The subscriber, which keeps a list of prices and accepts changes only from the newest relay.

use std::error::Error;

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, request::Parts},
    routing::get,
};
use serde::{Deserialize, Serialize};
use sqlx::{PgPool, Postgres};
use tokio::net::TcpListener;
use tower_fence::{Fence, FenceLayer, FencedTx, Resource, layer::DatabaseError};

use crate::STREAM;

const TABLES: &str = "SELECT pg_advisory_xact_lock(3101); \
    CREATE TABLE IF NOT EXISTS price_list \
        (sku TEXT PRIMARY KEY, cents BIGINT NOT NULL, event BIGINT NOT NULL); \
    CREATE TABLE IF NOT EXISTS heard \
        (position BIGSERIAL PRIMARY KEY, event BIGINT NOT NULL, sku TEXT NOT NULL, token BIGINT NOT NULL)";

#[derive(Deserialize, Serialize)]
struct Event {
    id: i64,
    sku: String,
    cents: i64,
}

pub async fn run(fence: Fence<Postgres>, addr: &str) -> Result<(), Box<dyn Error>> {
    let pool = fence.pool().clone();
    sqlx::raw_sql(TABLES).execute(&pool).await?;
    // All events change the same table, so there is one resource. The layer is reusable, because a
    // relay sends many events under one token.
    let layer = FenceLayer::new(fence, |_: &Parts| Resource::new(STREAM)).reusable();
    let app = Router::new()
        .route(&format!("/{STREAM}"), get(list).post(receive))
        .route_layer(layer)
        .with_state(pool);
    let listener = TcpListener::bind(addr).await?;
    println!("subscriber listens on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, app).await?)
}

/// Returns the last event of each SKU. A read with a token uses the connection of its transaction.
async fn list(
    tx: Option<FencedTx<Postgres>>,
    State(pool): State<PgPool>,
) -> Result<Json<Vec<Event>>, DatabaseError> {
    let events = sqlx::query_as("SELECT event, sku, cents FROM price_list ORDER BY sku");
    let events = match tx {
        Some(mut tx) => events.fetch_all(&mut *tx).await?,
        None => events.fetch_all(&pool).await?,
    };
    let events = events.into_iter();
    let events = events.map(|(id, sku, cents)| Event { id, sku, cents });
    Ok(Json(events.collect()))
}

/// Applies an event in the transaction that has admitted the relay's token.
async fn receive(
    mut tx: FencedTx<Postgres>,
    Json(event): Json<Event>,
) -> Result<StatusCode, DatabaseError> {
    let token = tx.admitted().token().get();
    sqlx::query(
        "INSERT INTO price_list VALUES ($1, $2, $3) \
         ON CONFLICT (sku) DO UPDATE SET cents = excluded.cents, event = excluded.event",
    )
    .bind(&event.sku)
    .bind(event.cents)
    .bind(event.id)
    .execute(&mut *tx)
    .await?;
    sqlx::query("INSERT INTO heard (event, sku, token) VALUES ($1, $2, $3)")
        .bind(event.id)
        .bind(&event.sku)
        .bind(token)
        .execute(&mut *tx)
        .await?;
    Ok(StatusCode::NO_CONTENT)
}
