//! A fenced GraphQL service, with async-graphql on SQLite.
//!
//! ```text
//! cargo run -p example-graphql
//! ```
//!
//! 1. The header `X-Resource` names the resource, because all operations have one route. The
//!    resolver compares the resource with its arguments. Otherwise a token of one resource would
//!    permit a write to another resource.
//! 2. A mutation is sent with POST, and writes in the fenced transaction. A query is sent with GET,
//!    and has no transaction.
//! 3. GraphQL reports an error with status 200. The handler adds `Rollback` to such a response, so
//!    the layer rolls back the mutation.
//! 4. The layer's refusals are GraphQL errors, with the name of the problem as their code.
//!
//! The client then simulates a paused holder. Token 1 belongs to the first holder, and token 2 to
//! its successor. Normally, an issuer grants the tokens: see the example `inventory`.

use std::{error::Error, sync::Arc};

use async_graphql::{Context, EmptySubscription, Object, Schema};
use async_graphql_axum::{GraphQLRequest, GraphQLResponse};
use axum::{
    Json, Router,
    extract::State,
    http::request::Parts,
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::{Value, json};
use sqlx::{Sqlite, SqlitePool, sqlite::SqlitePoolOptions};
use tokio::{net::TcpListener, sync::Mutex};
use tower_fence::{
    Fence, FenceLayer, Resource, SqliteFencedTx,
    layer::{Refusal, ResourceError, Rollback},
};

/// The transaction of a mutation. A mutex protects it, because resolvers share it by reference.
type Tx = Arc<Mutex<SqliteFencedTx>>;

type Stock = Schema<Query, Mutation, EmptySubscription>;

struct Query;

#[Object]
impl Query {
    /// Returns the remaining stock.
    async fn stock(&self, context: &Context<'_>, sku: String) -> async_graphql::Result<i64> {
        let stock = sqlx::query_scalar("SELECT n FROM stock WHERE sku = $1").bind(sku);
        Ok(stock.fetch_one(context.data::<SqlitePool>()?).await?)
    }
}

struct Mutation;

#[Object]
impl Mutation {
    /// Takes a quantity, and returns the remaining stock.
    async fn take(
        &self,
        context: &Context<'_>,
        sku: String,
        quantity: i64,
    ) -> async_graphql::Result<i64> {
        let mut tx = context.data::<Tx>()?.lock().await;
        let admitted = tx.admitted().resource().to_string();
        if sku != admitted {
            return Err(format!("the token is for {admitted}, not for {sku}").into());
        }
        let left: i64 =
            sqlx::query_scalar("UPDATE stock SET n = n - $1 WHERE sku = $2 RETURNING n")
                .bind(quantity)
                .bind(sku)
                .fetch_one(&mut **tx)
                .await?;
        if left < 0 {
            // The update above is rolled back.
            return Err("not enough in stock".into());
        }
        Ok(left)
    }
}

async fn execute(
    tx: Option<SqliteFencedTx>,
    State(stock): State<Stock>,
    request: GraphQLRequest,
) -> Response {
    let mut request = request.into_inner();
    if let Some(tx) = tx {
        request = request.data::<Tx>(Arc::new(Mutex::new(tx)));
    }
    let answer = stock.execute(request).await;
    let failed = answer.is_err();
    let mut response = GraphQLResponse::from(answer).into_response();
    if failed {
        response.extensions_mut().insert(Rollback);
    }
    response
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

fn render(refusal: &Refusal, _problem: Response) -> Response {
    let extensions = json!({ "code": refusal.problem_type().name() });
    let error = json!({ "message": refusal.to_string(), "extensions": extensions });
    Json(json!({ "data": null, "errors": [error] })).into_response()
}

fn service(fence: Fence<Sqlite>, pool: SqlitePool) -> Router {
    let stock = Schema::build(Query, Mutation, EmptySubscription).data(pool);
    Router::new()
        .route("/graphql", get(execute).post(execute))
        .route_layer(FenceLayer::new(fence, resource).map_refusal(render))
        .with_state(stock.finish())
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
    let url = format!("http://{}/graphql", listener.local_addr()?);
    let service = service(fence, pool);
    tokio::spawn(async move { axum::serve(listener, service).await });

    let sku = "sku-1";
    println!("holder 2 takes 2: {}", take(&url, sku, 2, 2).await?);
    println!(
        "holder 1 wakes up, and takes 1: {}",
        take(&url, sku, 1, 1).await?
    );
    println!("holder 3 takes 100: {}", take(&url, sku, 3, 100).await?);
    println!("holder 3 takes 3: {}", take(&url, sku, 3, 3).await?);
    println!(
        "the holder of sku-2 takes 1: {}",
        take(&url, "sku-2", 4, 1).await?
    );
    let query = "%7B%20stock(sku:%20%22sku-1%22)%20%7D"; // { stock(sku: "sku-1") }
    let answer = reqwest::get(format!("{url}?query={query}")).await?;
    println!("the stock: {}", answer.json::<Value>().await?);
    Ok(())
}

/// Takes a quantity of `sku-1` with a token of `resource`, and returns the response.
async fn take(
    url: &str,
    resource: &str,
    token: i64,
    quantity: i64,
) -> Result<Value, reqwest::Error> {
    let mutation = format!(r#"mutation {{ take(sku: "sku-1", quantity: {quantity}) }}"#);
    let request = reqwest::Client::new()
        .post(url)
        .header("X-Resource", resource)
        .header("Fencing-Token", token)
        .json(&json!({ "query": mutation }));
    let answer = request.send().await?.error_for_status()?;
    answer.json().await
}
