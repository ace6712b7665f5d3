//! A fenced GraphQL service, with async-graphql on SQLite.
//!
//! ```text
//! cargo run -p example-graphql
//! ```
//!
//! 1. The header `X-Resource` names the resource, because all operations have one route. Each
//!    resolver compares the resource with its arguments. Otherwise a token of one resource would
//!    permit a write to another resource, or an unfenced read of it.
//! 2. A mutation is sent with POST, and writes in the fenced transaction. The handler refuses a
//!    mutation with GET, because the layer admits GET as a read, which does not use up the token.
//! 3. A query is sent with GET. If the request has a token, the query reads in the fenced
//!    transaction, and otherwise on a connection of the pool.
//! 4. GraphQL reports an error with status 200. The handler adds `Rollback` to such a response, so
//!    the layer rolls back the mutation. The handler also removes the data of fields that succeeded
//!    before the error, because their writes are rolled back as well.
//! 5. The layer's refusals are GraphQL errors, with the name of the problem as their code.
//!
//! The client then simulates a paused holder. Token 1 belongs to the first holder, and token 2 to
//! its successor. Normally, an issuer grants the tokens: see the example `inventory`.

use std::{error::Error, sync::Arc};

use async_graphql::{Context, EmptySubscription, Object, Schema, parser::types::OperationType};
use async_graphql_axum::{GraphQLRequest, GraphQLResponse};
use axum::{
    Json, Router,
    extract::State,
    http::{Method, StatusCode, header::ALLOW, request::Parts},
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

/// The transaction of a request with a token. A mutex protects it, because resolvers share it by
/// reference.
type Tx = Arc<Mutex<SqliteFencedTx>>;

type Stock = Schema<Query, Mutation, EmptySubscription>;

struct Query;

#[Object]
impl Query {
    /// Returns the remaining stock.
    async fn stock(&self, context: &Context<'_>, sku: String) -> async_graphql::Result<i64> {
        let stock = sqlx::query_scalar("SELECT n FROM stock WHERE sku = $1").bind(sku.as_str());
        let stock = match context.data_opt::<Tx>() {
            Some(tx) => {
                let mut tx = tx.lock().await;
                check_admitted(&tx, &sku)?;
                stock.fetch_optional(&mut **tx).await
            }
            None => stock.fetch_optional(context.data::<SqlitePool>()?).await,
        };
        let stock: Option<i64> = stock.map_err(internal)?;
        stock.ok_or_else(|| "unknown SKU".into())
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
        if quantity < 1 {
            return Err("quantity must be at least 1".into());
        }
        let mut tx = context.data::<Tx>()?.lock().await;
        check_admitted(&tx, &sku)?;
        let left: Option<i64> =
            sqlx::query_scalar("UPDATE stock SET n = n - $1 WHERE sku = $2 RETURNING n")
                .bind(quantity)
                .bind(sku)
                .fetch_optional(&mut **tx)
                .await
                .map_err(internal)?;
        let left = left.ok_or("unknown SKU")?;
        if left < 0 {
            // The update above is rolled back.
            return Err("not enough in stock".into());
        }
        Ok(left)
    }
}

/// Checks that the token was admitted for this SKU.
fn check_admitted(tx: &SqliteFencedTx, sku: &str) -> async_graphql::Result<()> {
    let admitted = tx.admitted().resource().as_str();
    if sku != admitted {
        return Err(format!("the token is for {admitted}, not for {sku}").into());
    }
    Ok(())
}

/// Logs a database error. The client gets a fixed text.
fn internal(error: sqlx::Error) -> async_graphql::Error {
    eprintln!("a statement failed: {error}");
    "internal error".into()
}

async fn execute(
    tx: Option<SqliteFencedTx>,
    State(stock): State<Stock>,
    method: Method,
    request: GraphQLRequest,
) -> Response {
    let mut request = request.into_inner();
    if method.is_safe() && has_mutation(&mut request) {
        let text = "a mutation must be sent with POST";
        return (StatusCode::METHOD_NOT_ALLOWED, [(ALLOW, "POST")], text).into_response();
    }
    let is_fenced = tx.is_some();
    if let Some(tx) = tx {
        request = request.data::<Tx>(Arc::new(Mutex::new(tx)));
    }
    let mut answer = stock.execute(request).await;
    let failed = answer.is_err();
    if failed && is_fenced {
        answer.data = async_graphql::Value::Null;
    }
    let mut response = GraphQLResponse::from(answer).into_response();
    if failed {
        response.extensions_mut().insert(Rollback);
    }
    response
}

fn has_mutation(request: &mut async_graphql::Request) -> bool {
    request.parsed_query().is_ok_and(|document| {
        let mut operations = document.operations.iter();
        operations.any(|(_, operation)| operation.node.ty == OperationType::Mutation)
    })
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

    let both = format!("mutation {{ a: {} b: {} }}", field(1), field(100));
    for (step, resource, token, mutation) in [
        ("holder 2 takes 2", "sku-1", 2, take(2)),
        ("holder 1 wakes up, and takes 1", "sku-1", 1, take(1)),
        ("holder 3 takes 100", "sku-1", 3, take(100)),
        ("holder 3 takes 1 and 100", "sku-1", 3, both),
        ("holder 3 takes -5", "sku-1", 3, take(-5)),
        ("holder 3 takes 3", "sku-1", 3, take(3)),
        ("the holder of sku-2 takes 1", "sku-2", 4, take(1)),
    ] {
        let answer = send_post(&url, resource, token, &mutation).await?;
        println!("{step}: {answer}");
    }
    for (step, token, document) in [
        ("holder 4 takes 1 with GET", Some(4), take(1)),
        ("holder 4 reads", Some(4), stock("sku-1")),
        ("holder 4 reads sku-2", Some(4), stock("sku-2")),
        ("the stock", None, stock("sku-1")),
    ] {
        println!("{step}: {}", send_get(&url, token, &document).await?);
    }
    Ok(())
}

fn take(quantity: i64) -> String {
    format!("mutation {{ {} }}", field(quantity))
}

fn field(quantity: i64) -> String {
    format!(r#"take(sku: "sku-1", quantity: {quantity})"#)
}

fn stock(sku: &str) -> String {
    format!(r#"{{ stock(sku: "{sku}") }}"#)
}

/// Sends a document with POST and a token of `resource`, and returns the response.
async fn send_post(
    url: &str,
    resource: &str,
    token: i64,
    document: &str,
) -> Result<Value, reqwest::Error> {
    let request = reqwest::Client::new()
        .post(url)
        .header("X-Resource", resource)
        .header("Fencing-Token", token)
        .json(&json!({ "query": document }));
    let answer = request.send().await?.error_for_status()?;
    answer.json().await
}

/// Sends a document with GET, and with a token of `sku-1` if there is one.
async fn send_get(url: &str, token: Option<i64>, document: &str) -> Result<String, Box<dyn Error>> {
    let url = reqwest::Url::parse_with_params(url, [("query", document)])?;
    let mut request = reqwest::Client::new().get(url);
    if let Some(token) = token {
        request = request
            .header("X-Resource", "sku-1")
            .header("Fencing-Token", token);
    }
    let answer = request.send().await?;
    let status = answer.status();
    Ok(format!("{status} {}", answer.text().await?))
}
