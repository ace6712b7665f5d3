//! The routes and their handlers.

use std::time::Duration;

use axum::{
    Json, Router,
    extract::{
        Path, State,
        rejection::{JsonRejection, PathRejection},
    },
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use sqlx::Pool;
use tokio::time::timeout;
use tower_fence::{
    Fence, FenceLayer, FencedTx, Idempotency, PathParam, Resource, TokenKeys,
    issuer::Issuer,
    layer::DatabaseError,
    lease::Leases,
    problem::{Problem, ProblemType},
};

use crate::stock::Stock;

/// All routes. The resource of a SKU is the SKU itself. With keys, tokens are signed and verified.
pub fn router<DB: Stock, L: Leases + Clone>(
    fence: Fence<DB>,
    leases: L,
    token_keys: Option<TokenKeys>,
) -> Router {
    let pool = fence.get_pool().clone();
    // Whoever got no answer to a write may repeat it under its key.
    let keys = Idempotency::optional();
    let mut one = FenceLayer::new(fence.clone(), PathParam("sku")).idempotent(keys.clone());
    // A transfer writes to both SKUs, and needs a token for each.
    let mut both = FenceLayer::new(fence, [PathParam("from"), PathParam("to")]).idempotent(keys);
    let issuer = Issuer::new(leases.clone());
    let locks = match token_keys {
        Some(keys) => {
            one = one.verify_with(keys.clone());
            both = both.verify_with(keys.clone());
            issuer.sign_with(keys).router()
        }
        None => issuer.router(),
    };
    let transfers = Router::new()
        .route("/inventory/{from}/transfer/{to}", post(transfer::<DB>))
        .route_layer(both);
    Router::new()
        .route("/inventory/{sku}", get(show::<DB>).put(set::<DB>))
        .route("/inventory/{sku}/decrement", post(decrement::<DB>))
        .route_layer(one)
        .with_state(pool.clone())
        .merge(transfers)
        .route("/healthz", get(health::<DB, L>).with_state((pool, leases)))
        .nest("/locks", locks)
}

/// How long a read may take.
const READ_LIMIT: Duration = Duration::from_secs(5);

#[derive(Serialize)]
struct Level {
    sku: String,
    stock: i64,
}

#[derive(Serialize)]
struct Levels {
    from: Level,
    to: Level,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewStock {
    stock: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    quantity: u32,
}

/// The layer has checked the name of what is fenced; a plain read brings any.
async fn show<DB: Stock>(
    State(pool): State<Pool<DB>>,
    sku: Result<Path<Resource>, PathRejection>,
) -> Result<Json<Level>, Error> {
    let Path(sku) = sku.map_err(|_| Error::Sku)?;
    let reading = async {
        let mut conn = pool.acquire().await?;
        DB::get(&mut conn, sku.as_str())
            .await?
            .ok_or(Error::NotFound)
    };
    let read = timeout(READ_LIMIT, reading).await;
    let stock = read.unwrap_or(Err(Error::Unavailable))?;
    let sku = sku.to_string();
    Ok(Json(Level { sku, stock }))
}

async fn set<DB: Stock>(
    mut tx: FencedTx<DB>,
    Path(sku): Path<String>,
    body: Result<Json<NewStock>, JsonRejection>,
) -> Result<Json<Level>, Error> {
    let stock = body?.stock.into();
    DB::set(&mut tx, &sku, stock).await?;
    Ok(Json(Level { sku, stock }))
}

/// Reads, decides, writes. No other holder can come in between: the transaction holds the lock
/// of the SKU's fence, and what is done on `tx` commits with it or not at all.
async fn decrement<DB: Stock>(
    mut tx: FencedTx<DB>,
    Path(sku): Path<String>,
    body: Result<Json<Order>, JsonRejection>,
) -> Result<Json<Level>, Error> {
    let quantity = i64::from(body?.quantity);
    if quantity == 0 {
        return Err(Error::Quantity);
    }
    let stock = DB::get(&mut tx, &sku).await?.ok_or(Error::NotFound)?;
    if stock < quantity {
        return Err(Error::OutOfStock { stock });
    }
    let stock = stock - quantity;
    DB::set(&mut tx, &sku, stock).await?;
    Ok(Json(Level { sku, stock }))
}

/// Takes from one SKU and gives to another: both, or neither.
async fn transfer<DB: Stock>(
    mut tx: FencedTx<DB>,
    Path((from, to)): Path<(String, String)>,
    body: Result<Json<Order>, JsonRejection>,
) -> Result<Json<Levels>, Error> {
    let quantity = i64::from(body?.quantity);
    if quantity == 0 {
        return Err(Error::Quantity);
    }
    if from == to {
        return Err(Error::SameSku);
    }
    let stock = DB::get(&mut tx, &from).await?.ok_or(Error::NotFound)?;
    let other = DB::get(&mut tx, &to).await?.ok_or(Error::NotFound)?;
    if stock < quantity {
        return Err(Error::OutOfStock { stock });
    }
    let (stock, other) = (stock - quantity, other + quantity);
    DB::set(&mut tx, &from, stock).await?;
    DB::set(&mut tx, &to, other).await?;
    let level = |sku, stock| Level { sku, stock };
    Ok(Json(Levels {
        from: level(from, stock),
        to: level(to, other),
    }))
}

/// 200 when both stores answer.
async fn health<DB: Stock, L: Leases + Clone>(
    State((pool, leases)): State<(Pool<DB>, L)>,
) -> Result<Json<serde_json::Value>, Error> {
    let stores = async {
        DB::get(&mut *pool.acquire().await?, "healthz").await?;
        let probe = Resource::new("healthz").map_err(|_| Error::NotFound)?;
        leases
            .inspect(&probe)
            .await
            .map_err(|_| Error::Unavailable)?;
        Ok(Json(serde_json::json!({ "status": "ok" })))
    };
    let answer = timeout(READ_LIMIT, stores).await;
    answer.unwrap_or(Err(Error::Unavailable))
}

enum Error {
    NotFound,
    OutOfStock { stock: i64 },
    Sku,
    Quantity,
    SameSku,
    Body(JsonRejection),
    Database(sqlx::Error),
    Unavailable,
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

impl From<JsonRejection> for Error {
    fn from(rejection: JsonRejection) -> Self {
        Self::Body(rejection)
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let unavailable =
            || Problem::new(ProblemType::StoreUnavailable).retry_after(Duration::from_secs(1));
        let invalid =
            |field: &str| Problem::new(ProblemType::InvalidRequest).member("field", field);
        match self {
            Self::NotFound => Problem::custom(
                "https://example.com/problems/not-found",
                StatusCode::NOT_FOUND,
                "No such SKU",
            ),
            Self::OutOfStock { stock } => Problem::custom(
                "https://example.com/problems/out-of-stock",
                StatusCode::CONFLICT,
                "Not enough in stock",
            )
            .member("stock", stock),
            Self::Sku => invalid("resource").detail("this cannot name a SKU"),
            Self::Quantity => invalid("quantity").detail("`quantity` is at least 1"),
            Self::SameSku => invalid("to").detail("a transfer needs two different SKUs"),
            Self::Body(rejection) => invalid("body").detail(rejection.body_text()),
            Self::Database(error) => return DatabaseError::from(error).into_response(),
            Self::Unavailable => unavailable(),
        }
        .into_response()
    }
}
