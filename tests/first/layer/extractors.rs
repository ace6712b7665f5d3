//! Extractors of handlers that serve both reads and writes, and tokens and resources as database
//! columns.

use axum::{
    Router,
    routing::{any, get},
};
use sqlx::{Postgres, Sqlite};
use tower_fence::{FenceLayer, FencedTx, PathParam, Resource, Token, layer::FenceService};

use super::handlers::insert;
use crate::support::{
    database::{TestDatabase, on_both_databases},
    http::{Answer, Server},
};

on_both_databases!(
    optional_extractor_has_a_transaction_only_with_a_token,
    a_service_is_fenced_without_a_layer,
);

async fn maybe<DB: TestDatabase>(tx: Option<FencedTx<DB>>) -> String {
    let Some(mut tx) = tx else {
        return "read".into();
    };
    insert(&mut tx).await;
    "written".into()
}

async fn is_fenced<DB: TestDatabase>(tx: Option<FencedTx<DB>>) -> String {
    tx.is_some().to_string()
}

async fn twice<DB: TestDatabase>(
    first: Option<FencedTx<DB>>,
    second: Option<FencedTx<DB>>,
) -> String {
    (first.is_some() && second.is_none()).to_string()
}

async fn optional_extractor_has_a_transaction_only_with_a_token<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let layer = FenceLayer::new(db.fence(), PathParam("r"));
    let app = Router::new()
        .route("/{r}", any(maybe::<DB>))
        .route("/{r}/twice", any(twice::<DB>))
        .route("/{r}/fenced", get(is_fenced::<DB>))
        .route_layer(layer.clone())
        .route("/{r}/deferred", any(maybe::<DB>).layer(layer.deferred()))
        .route("/unfenced", any(maybe::<DB>));
    let server = Server::start(app).await;
    assert_eq!(Answer::to(server.get("/a")).await.text, "read");
    assert_eq!(db.entries().await, 0);
    assert_eq!(server.write("/a", 5).await.text, "written");
    assert_eq!(db.entries().await, 1);
    let fenced_read = server.get("/a/fenced").header("Fencing-Token", "6");
    assert_eq!(Answer::to(fenced_read).await.text, "true");

    // `None` never hides an error: a transaction that was already taken, one that has not begun,
    // and a missing layer.
    let taken = server.write("/a/twice", 6).await;
    assert!(taken.text.contains("already taken"), "{taken:?}");
    let deferred = server.write("/a/deferred", 6).await;
    assert!(deferred.text.contains("deferred"), "{deferred:?}");
    let unfenced = server.write("/unfenced", 6).await;
    for mistake in [taken, deferred, unfenced] {
        mistake.is_problem(500, "misconfigured");
    }
    assert_eq!(db.entries().await, 1);
}

async fn a_service_is_fenced_without_a_layer<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let from_header = |parts: &axum::http::request::Parts| {
        let name = parts.headers.get("x-resource").unwrap().to_str().unwrap();
        Resource::new(name)
    };
    let inner = Router::new().route("/", any(maybe::<DB>));
    let service = FenceService::new(inner, FenceLayer::new(db.fence(), from_header));
    let server = Server::start(Router::new().fallback_service(service)).await;
    let write = |token: i64| {
        let request = server.post("/").header("X-Resource", "a");
        Answer::to(request.header("Fencing-Token", token))
    };
    assert_eq!(write(5).await.text, "written");
    write(4).await.is_problem(412, "stale-token");
}

/// Runs the same assertions on both databases, whose column types differ.
macro_rules! values_are_columns {
    ($db:ty, $number:literal) => {{
        let db = <$db>::fresh(1).await;
        let (token, resource) = (Token::MAX, Resource::new("café").unwrap());
        let both: (Token, Resource) = sqlx::query_as("SELECT $1, $2")
            .bind(token)
            .bind(&resource)
            .fetch_one(&db.pool)
            .await
            .unwrap();
        assert_eq!(both, (token, resource));
        let none: (Option<Token>, Option<Resource>) = sqlx::query_as("SELECT $1, $2")
            .bind(None::<Token>)
            .bind(None::<Resource>)
            .fetch_one(&db.pool)
            .await
            .unwrap();
        assert_eq!(none, (None, None));
        for (column, error) in [
            (concat!("SELECT CAST(0 AS ", $number, ")"), "not 0"),
            (
                concat!("SELECT CAST(1000000000000000 AS ", $number, ")"),
                "not 1000000000000000",
            ),
        ] {
            let read = sqlx::query_scalar::<_, Token>(column).fetch_one(&db.pool);
            let refused = read.await.unwrap_err().to_string();
            assert_contains!(refused, error);
        }
        for (column, error) in [
            ("SELECT CAST('' AS TEXT)", "cannot be empty"),
            ("SELECT CAST('a\nb' AS TEXT)", "control character"),
        ] {
            let read = sqlx::query_scalar::<_, Resource>(column).fetch_one(&db.pool);
            let refused = read.await.unwrap_err().to_string();
            assert_contains!(refused, error);
        }
        // A column of another type is not a token.
        let text = sqlx::query_scalar::<_, Token>("SELECT CAST('1' AS TEXT)");
        text.fetch_one(&db.pool).await.unwrap_err();
    }};
}

#[tokio::test]
async fn tokens_and_resources_are_columns_on_postgres() {
    values_are_columns!(Postgres, "BIGINT");
    let db = Postgres::fresh(1).await;
    let tokens = [1, 5].map(|token| Token::new(token).unwrap());
    let found: Vec<Token> =
        sqlx::query_scalar("SELECT n FROM generate_series(1::bigint, 9) n WHERE n = ANY($1)")
            .bind(tokens)
            .fetch_all(&db.pool)
            .await
            .unwrap();
    assert_eq!(found, tokens);
}

#[tokio::test]
async fn tokens_and_resources_are_columns_on_sqlite() {
    values_are_columns!(Sqlite, "INTEGER");
}
