//! The routes and their handlers.

use std::{env, num::ParseIntError, time::Duration};

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
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use sqlx::Pool;
use tokio::{sync::watch, time::timeout};
use tower_fence::{
    Fence, FenceLayer, FencedTx, Idempotency, PathParam, Resource, TokenKeys,
    issuer::Issuer,
    layer::DatabaseError,
    lease::LeaseAdmin,
    problem::{Problem, ProblemType},
};

use crate::{
    api::{self, NOT_FOUND, OUT_OF_STOCK},
    stock::Stock,
};

/// Builds all routes. The name of a SKU's resource is the SKU. If there are token keys, tokens are
/// signed and verified. When `stopped` becomes true, requests that wait for a lease are refused.
pub fn router<DB: Stock, L: LeaseAdmin + Clone>(
    fence: Fence<DB>,
    leases: L,
    token_keys: Option<TokenKeys>,
    mut stopped: watch::Receiver<bool>,
) -> Result<Router, String> {
    let pool = fence.pool().clone();
    // A client that got no response to its write retries it under the same idempotency key. All
    // clients share one principal, because this service does not authenticate them. Without a
    // principal, a request with a key and cookies would be refused.
    let keys = Idempotency::optional().principal(|_| Some("anybody"));
    let mut one = FenceLayer::new(fence.clone(), PathParam("sku")).idempotent(keys.clone());
    // A transfer writes both SKUs, and needs a token for each of them.
    let mut both = FenceLayer::new(fence, [PathParam("from"), PathParam("to")]).idempotent(keys);
    let issuer = Issuer::new(leases.clone())
        .wait_limit(wait_limit()?)
        .close_on(async move {
            let _ = stopped.wait_for(|stopped| *stopped).await;
        });
    let described = issuer.operator_openapi();
    let document = api::document(described.clone());
    let mut issuer = issuer.serve_openapi(described);
    if let Some(keys) = token_keys {
        one = one.verify_with(keys.clone());
        both = both.verify_with(keys.clone());
        issuer = issuer.sign_with(keys);
    }
    // A real service would authenticate operators before it allows them to break leases.
    let locks: Router = issuer.operator_router();
    // The layer covers only the methods of each route. Requests with other methods are answered
    // with 405, regardless of their token.
    let level = get(show::<DB>).put(set::<DB>).route_layer(one.clone());
    let stock = Router::new()
        .route("/inventory/{sku}", level)
        .route(
            "/inventory/{sku}/decrement",
            post(decrement::<DB>).route_layer(one),
        )
        .with_state(pool.clone());
    let transfers = post(transfer::<DB>).route_layer(both);
    let transfers = Router::new().route("/inventory/{from}/transfer/{to}", transfers);
    let healthz = get(health::<DB, L>).with_state((pool, leases));
    Ok(Router::new()
        .route("/healthz", healthz)
        .merge(stock)
        .merge(transfers)
        .nest("/locks", locks)
        .route("/openapi.json", get(async move || Json(document))))
}

/// Returns the longest time for which a request for a lease may wait in the queue: `WAIT_LIMIT_MS`,
/// or one minute.
fn wait_limit() -> Result<Duration, String> {
    let ms = env::var("WAIT_LIMIT_MS").map_or(Ok(60_000), |ms| ms.parse());
    let ms = ms.map_err(|error: ParseIntError| format!("WAIT_LIMIT_MS: {error}"))?;
    Ok(Duration::from_millis(ms))
}

/// The timeout of a read without a token. The layer limits the duration of a fenced read.
const READ_LIMIT: Duration = Duration::from_secs(5);

/// The stock of a SKU.
#[derive(Serialize)]
pub struct Level {
    sku: String,
    stock: i64,
}

/// The stock of both SKUs.
#[derive(Serialize)]
pub struct Levels {
    from: Level,
    to: Level,
}

/// The new stock of a SKU.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewStock {
    #[serde(deserialize_with = "whole")]
    stock: u32,
}

/// The quantity to take.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    #[serde(deserialize_with = "whole")]
    quantity: u32,
}

/// Parses an integer, written as `7` or as `7.0`, which are the same number in JSON.
fn whole<'de, D: Deserializer<'de>>(number: D) -> Result<u32, D::Error> {
    let number = f64::deserialize(number)?;
    let is_whole = number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number);
    is_whole.then_some(number as u32).ok_or_else(|| {
        D::Error::custom(format!(
            "{number} is not a whole number from 0 to {}",
            u32::MAX
        ))
    })
}

/// The health of the service.
#[derive(Serialize)]
pub struct Health {
    status: &'static str,
}

/// Returns the stock of a SKU. If the request is fenced, the layer has checked the SKU, and the
/// handler reads in the transaction of the request. If each handler took a second connection of the
/// pool, concurrent requests could wait for each other's connections. The layer has not checked the
/// SKU of a read without a token, so this handler does.
async fn show<DB: Stock>(
    tx: Option<FencedTx<DB>>,
    State(pool): State<Pool<DB>>,
    sku: Result<Path<Resource>, PathRejection>,
) -> Result<Json<Level>, Error> {
    let Path(sku) = sku.map_err(|_| Error::Sku)?;
    let stock = match tx {
        Some(mut tx) => DB::get(&mut tx, sku.as_str()).await?,
        None => {
            let reading = async {
                let mut conn = pool.acquire().await?;
                DB::get(&mut conn, sku.as_str()).await
            };
            let read = timeout(READ_LIMIT, reading).await;
            read.map_err(|_| Error::Unavailable)??
        }
    };
    let stock = stock.ok_or(Error::NotFound)?;
    let sku = sku.to_string();
    Ok(Json(Level { sku, stock }))
}

/// Sets the stock of a SKU.
async fn set<DB: Stock>(
    mut tx: FencedTx<DB>,
    Path(sku): Path<String>,
    body: Result<Json<NewStock>, JsonRejection>,
) -> Result<Json<Level>, Error> {
    let stock = body?.stock.into();
    DB::set(&mut tx, &sku, stock).await?;
    Ok(Json(Level { sku, stock }))
}

/// Takes a quantity from the stock of a SKU. The handler reads the stock, and then writes it. No
/// other holder can write in between, because the transaction has locked the row of the SKU's
/// fence. All statements on `tx` commit together with the admission, or not at all.
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

/// Moves a quantity from one SKU to another, atomically.
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

/// Checks that the database and the lease store respond.
async fn health<DB: Stock, L: LeaseAdmin + Clone>(
    State((pool, leases)): State<(Pool<DB>, L)>,
) -> Result<Json<Health>, Error> {
    let stores = async {
        DB::get(&mut *pool.acquire().await?, "healthz").await?;
        let probe = Resource::new("healthz").map_err(|_| Error::NotFound)?;
        leases
            .inspect(&probe)
            .await
            .map_err(|_| Error::Unavailable)?;
        Ok(Json(Health { status: "ok" }))
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
            Self::NotFound => Problem::custom(NOT_FOUND, StatusCode::NOT_FOUND, "No such SKU"),
            Self::OutOfStock { stock } => {
                Problem::custom(OUT_OF_STOCK, StatusCode::CONFLICT, "Not enough in stock")
                    .member("stock", stock)
            }
            Self::Sku => invalid("resource").detail("invalid SKU"),
            Self::Quantity => invalid("quantity").detail("must be at least 1"),
            Self::SameSku => invalid("to").detail("a transfer needs two different SKUs"),
            Self::Body(rejection) => invalid("body").detail(rejection.body_text()),
            Self::Database(error) => return DatabaseError::from(error).into_response(),
            Self::Unavailable => unavailable(),
        }
        .into_response()
    }
}
