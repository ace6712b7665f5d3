//! A fenced gRPC service, with tonic on SQLite.
//!
//! ```text
//! cargo run -p example-grpc
//! ```
//!
//! 1. The metadata key `x-resource` names the resource, because a call has its arguments in the
//!    body. The handler compares the resource with the arguments. Otherwise a token of one resource
//!    would permit a write to another resource.
//! 2. The layer wraps the routes of the service. The handler takes its transaction from the
//!    extensions of the call.
//! 3. gRPC reports an error with status 200 and the header `grpc-status`. The function for
//!    `commit_if` reads that header, so the layer rolls back a failed call. The function supports
//!    only calls with a single response message. For a stream of responses, tonic sends the status
//!    in the trailers, after the layer has committed.
//! 4. The layer's refusals are gRPC statuses, with the name of the problem in their metadata.
//! 5. A call must be sent with POST. tonic accepts every method, but the fence treats a call with
//!    GET as a read, which does not use up the token. A layer outside the fence therefore refuses
//!    all other methods.
//!
//! The client then simulates a paused holder. Token 1 belongs to the first holder, and token 2 to
//! its successor. Normally, an issuer grants the tokens: see the example `inventory`.

use std::{error::Error, future::poll_fn, mem};

use axum::{
    Router,
    body::Body,
    extract::{self, FromRequestParts},
    http::{self, Method, StatusCode, header::ALLOW, request::Parts},
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
};
use prost::Message;
use sqlx::{Sqlite, sqlite::SqlitePoolOptions};
use tokio::net::TcpListener;
use tonic::{Code, Request, Status, codegen::Service as _, service::Routes, transport::Channel};
use tower_fence::{
    Fence, FenceLayer, Resource, SqliteFencedTx,
    layer::{Refusal, ResourceError},
};

use self::stock::{
    stock_client::StockClient,
    stock_server::{Stock, StockServer},
};

mod stock {
    include!(concat!(env!("OUT_DIR"), "/shop.Stock.rs"));
}

/// The metadata key of the problem's name.
const PROBLEM: &str = "fence-problem";

#[derive(Clone, PartialEq, prost::Message)]
pub struct TakeRequest {
    #[prost(string, tag = "1")]
    sku: String,
    #[prost(int64, tag = "2")]
    quantity: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct TakeReply {
    #[prost(int64, tag = "1")]
    left: i64,
}

struct Service;

#[tonic::async_trait]
impl Stock for Service {
    /// Takes a quantity, and returns the remaining stock.
    async fn take(
        &self,
        mut request: Request<TakeRequest>,
    ) -> Result<tonic::Response<TakeReply>, Status> {
        let mut tx = transaction(&mut request).await?;
        let TakeRequest { sku, quantity } = request.into_inner();
        if quantity < 1 {
            return Err(Status::invalid_argument("quantity must be at least 1"));
        }
        let admitted = tx.admitted().resource().to_string();
        if sku != admitted {
            let text = format!("the token is for {admitted}, not for {sku}");
            return Err(Status::invalid_argument(text));
        }
        let left: Option<i64> =
            sqlx::query_scalar("UPDATE stock SET n = n - $1 WHERE sku = $2 RETURNING n")
                .bind(quantity)
                .bind(sku)
                .fetch_optional(&mut *tx)
                .await
                .map_err(internal)?;
        let left = left.ok_or_else(|| Status::not_found("unknown SKU"))?;
        if left < 0 {
            // The update above is rolled back.
            return Err(Status::failed_precondition("not enough in stock"));
        }
        Ok(tonic::Response::new(TakeReply { left }))
    }
}

/// Returns the fenced transaction of a call.
async fn transaction<T>(request: &mut Request<T>) -> Result<SqliteFencedTx, Status> {
    let mut call = http::Request::new(());
    *call.method_mut() = Method::POST;
    *call.extensions_mut() = mem::take(request.extensions_mut());
    let mut parts = call.into_parts().0;
    let tx = SqliteFencedTx::from_request_parts(&mut parts, &()).await;
    tx.map_err(internal)
}

/// Logs an error. The client gets a fixed text.
fn internal(error: impl Error) -> Status {
    eprintln!("a call failed: {error}");
    Status::internal("internal error")
}

fn resource(parts: &Parts) -> Result<Resource, ResourceError> {
    let name = parts
        .headers
        .get("x-resource")
        .ok_or(ResourceError::Nothing)?;
    Ok(Resource::new(
        name.to_str().map_err(|_| ResourceError::Nothing)?,
    )?)
}

/// Whether a unary call has succeeded. See rule 3 above.
fn commits(response: &Response) -> bool {
    let status = response.headers().get("grpc-status");
    status.is_none_or(|status| status == "0")
}

fn render(refusal: &Refusal, problem: Response) -> Response {
    let code = match problem.status().as_u16() {
        412 => Code::FailedPrecondition,
        403 => Code::PermissionDenied,
        408 | 503 => Code::Unavailable,
        400..500 => Code::InvalidArgument,
        _ => Code::Internal,
    };
    let mut status = Status::new(code, refusal.to_string());
    if let Ok(name) = refusal.problem_type().name().parse() {
        status.metadata_mut().insert(PROBLEM, name);
    }
    status.into_http::<Body>()
}

/// Refuses a call with a method other than POST. See rule 5 above.
async fn only_post(request: extract::Request, next: Next) -> Response {
    if request.method() == Method::POST {
        return next.run(request).await;
    }
    (StatusCode::METHOD_NOT_ALLOWED, [(ALLOW, "POST")]).into_response()
}

fn service(fence: Fence<Sqlite>) -> Router {
    let layer = FenceLayer::new(fence, resource)
        .commit_if(commits)
        .map_refusal(render);
    Routes::new(StockServer::new(Service))
        .into_axum_router()
        .route_layer(layer)
        .route_layer(from_fn(only_post)) // the last layer is the outermost
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // A database in memory exists only as long as its connection.
    let pool = SqlitePoolOptions::new()
        .max_connections(1)
        .connect("sqlite::memory:")
        .await?;
    sqlx::raw_sql(
        "CREATE TABLE stock (sku TEXT, n INTEGER); INSERT INTO stock VALUES ('sku-1', 9)",
    )
    .execute(&pool)
    .await?;
    let fence = Fence::new(pool.clone());
    fence.migrate().await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let service = service(fence);
    tokio::spawn(async move { axum::serve(listener, service).await });

    let channel = Channel::from_shared(url)?.connect().await?;
    let mut client = StockClient::new(channel.clone());
    for (step, resource, token, quantity) in [
        ("holder 2 takes 2", "sku-1", 2, 2),
        ("holder 1 wakes up, and takes 1", "sku-1", 1, 1),
        ("holder 3 takes 100", "sku-1", 3, 100),
        ("holder 3 takes -5", "sku-1", 3, -5),
        ("holder 3 takes 3", "sku-1", 3, 3),
        ("the holder of sku-2 takes 1", "sku-2", 4, 1),
    ] {
        let answer = take(&mut client, resource, token, quantity).await?;
        println!("{step}: {answer}");
    }
    let answer = take_with_get(channel, 4).await?;
    println!("holder 4 takes 1 with GET: {answer}");
    let stock: i64 = sqlx::query_scalar("SELECT n FROM stock")
        .fetch_one(&pool)
        .await?;
    println!("the stock: {stock}");
    Ok(())
}

/// Takes a quantity of `sku-1` with a token of `resource`, and returns the response as text.
async fn take(
    client: &mut StockClient<Channel>,
    resource: &str,
    token: i64,
    quantity: i64,
) -> Result<String, Box<dyn Error>> {
    let sku = "sku-1".to_owned();
    let mut request = Request::new(TakeRequest { sku, quantity });
    request
        .metadata_mut()
        .insert("x-resource", resource.parse()?);
    request
        .metadata_mut()
        .insert("fencing-token", token.to_string().parse()?);
    Ok(match client.take(request).await {
        Ok(reply) => format!("{} left", reply.into_inner().left),
        Err(status) => {
            let problem = status
                .metadata()
                .get(PROBLEM)
                .and_then(|name| name.to_str().ok());
            format!(
                "{:?} {} ({})",
                status.code(),
                status.message(),
                problem.unwrap_or("not refused by the fence")
            )
        }
    })
}

/// Sends a call that takes 1 of `sku-1`, but with GET, and returns the status of the response.
async fn take_with_get(mut channel: Channel, token: i64) -> Result<StatusCode, Box<dyn Error>> {
    let sku = "sku-1".to_owned();
    let message = TakeRequest { sku, quantity: 1 }.encode_to_vec();
    // The prefix of a message: a byte 0 (not compressed), and the length of the message.
    let mut body = vec![0];
    body.extend(u32::try_from(message.len())?.to_be_bytes());
    body.extend(message);
    let request = http::Request::get("/shop.Stock/Take")
        .header("content-type", "application/grpc")
        .header("x-resource", "sku-1")
        .header("fencing-token", token)
        .body(tonic::body::Body::new(Body::from(body)))?;
    poll_fn(|cx| channel.poll_ready(cx)).await?;
    Ok(channel.call(request).await?.status())
}
