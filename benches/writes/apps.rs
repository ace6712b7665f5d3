//! The contenders that are handlers of one axum server with one pool.

use std::sync::LazyLock;

use axum::{
    Router,
    extract::{Path, State},
    http::{HeaderMap, StatusCode},
    routing::post,
};
use sqlx::{PgConnection, PgPool, Postgres};
use tower_fence::{
    Fence, FenceLayer, Idempotency, PathParam, PgFencedTx, PgPendingWrite, TokenKey, TokenKeys,
    fence::WriteError,
    layer::{DatabaseError, Refusal},
    problem::{Problem, ProblemType},
};

/// Headers of a request to a contender.
#[derive(Clone, Copy, PartialEq)]
pub enum Carries {
    Nothing,
    /// A token that is newer than all earlier ones.
    NewToken,
    /// A reusable token.
    OneToken,
    NewTokenAndKey,
    StaleToken,
    /// A new signed token.
    SignedToken,
    /// A token with an invalid signature.
    ForgedToken,
}

pub struct App {
    pub name: &'static str,
    pub carries: Carries,
    /// The headers of a request on one hot resource, if the contender is measured there.
    pub when_hot: Option<Carries>,
    pub router: Router,
}

/// A token that is higher than all other tokens of the bench.
pub const HIGHEST: i64 = 900_000_000_000_000;

/// The write of every contender.
pub const UPDATE: &str = "UPDATE stock SET n = n - 1 WHERE sku = $1";

/// Handwritten check.
const ADMIT: &str = "INSERT INTO tokens AS f (resource, max_token, updated_at) \
     VALUES ($1, $3, CURRENT_TIMESTAMP) \
     ON CONFLICT (resource) DO UPDATE \
     SET max_token = excluded.max_token, updated_at = excluded.updated_at \
     WHERE f.max_token < $2";

/// Table of the handwritten check.
pub const TOKENS: &str = "CREATE TABLE tokens (resource TEXT COLLATE \"C\" PRIMARY KEY, \
     max_token BIGINT NOT NULL, updated_at TIMESTAMPTZ NOT NULL) WITH (fillfactor = 70)";

/// Returns the keys that sign the tokens.
pub fn token_keys() -> TokenKeys {
    static KEYS: LazyLock<TokenKeys> = LazyLock::new(|| {
        let key = TokenKey::random("k1").expect("a name");
        TokenKeys::new([key]).expect("a key")
    });
    KEYS.clone()
}

/// Returns all contenders.
///
/// Each contender has a name, the headers of its requests, the headers of its requests on one hot
/// resource, and a handler with its layers.
pub fn apps(pool: &PgPool, fence: &Fence<Postgres>) -> Vec<App> {
    use Carries::{
        ForgedToken, NewToken, NewTokenAndKey, Nothing, OneToken, SignedToken, StaleToken,
    };
    let plain = |router: Router<PgPool>| router.with_state(pool.clone());
    let route = || Router::new().route("/{sku}", post(fenced));
    let layer = || FenceLayer::new(fence.clone(), PathParam("sku"));
    // Clones of this fence share the kept connections.
    let reusing = Fence::builder()
        .reuse_connections(true)
        .build(fence.pool().clone());
    let reusing = || FenceLayer::new(reusing.clone(), PathParam("sku"));
    let keys = Idempotency::optional();
    let app = |name, carries, when_hot, router| App {
        name,
        carries,
        when_hot,
        router,
    };
    vec![
        app("no-op", Nothing, None, at(no_op)),
        app("update", Nothing, Some(Nothing), plain(at(update))),
        app(
            "transaction",
            Nothing,
            Some(Nothing),
            plain(at(transaction)),
        ),
        app(
            "advisory lock",
            Nothing,
            Some(Nothing),
            plain(at(advisory_lock)),
        ),
        // The column refuses equal tokens, so each request needs a new token.
        app(
            "version column",
            NewToken,
            Some(NewToken),
            plain(at(version_column)),
        ),
        app(
            "check by hand",
            NewToken,
            Some(OneToken),
            plain(at(by_hand)),
        ),
        // Requests with new tokens for one resource overtake each other on the way to the row lock
        // of the resource, and late tokens are refused.
        app("axum-sqlx-tx", NewToken, Some(OneToken), with_sqlx_tx(pool)),
        // With the fence, requests do not overtake each other, because the layer queues the
        // requests for each resource.
        app(
            "fence",
            NewToken,
            Some(NewToken),
            route().route_layer(layer()),
        ),
        app(
            "fence, signed",
            SignedToken,
            None,
            route().route_layer(layer().verify_with(token_keys())),
        ),
        app(
            "fence, reuse",
            NewToken,
            Some(NewToken),
            route().route_layer(reusing()),
        ),
        app(
            "fence, reusable",
            OneToken,
            Some(OneToken),
            route().route_layer(layer().reusable()),
        ),
        app(
            "fence, idempotent",
            NewTokenAndKey,
            None,
            route().route_layer(layer().idempotent(keys.clone())),
        ),
        app(
            "fence, idempotent, reuse",
            NewTokenAndKey,
            None,
            route().route_layer(reusing().idempotent(keys)),
        ),
        app(
            "one statement",
            NewToken,
            Some(NewToken),
            at(one_statement).route_layer(layer().deferred()),
        ),
        app(
            "one statement, reuse",
            NewToken,
            Some(NewToken),
            at(one_statement).route_layer(reusing().deferred()),
        ),
        app(
            "deferred",
            NewToken,
            None,
            at(deferred).route_layer(layer().deferred()),
        ),
        app("refusal by hand", StaleToken, None, at(refusal)),
        app("stale", StaleToken, None, route().route_layer(layer())),
        app(
            "forged",
            ForgedToken,
            None,
            route().route_layer(layer().verify_with(token_keys())),
        ),
    ]
}

fn at<H, T, S>(handler: H) -> Router<S>
where
    H: axum::handler::Handler<T, S>,
    T: 'static,
    S: Clone + Send + Sync + 'static,
{
    Router::new().route("/{sku}", post(handler))
}

async fn decrement(conn: &mut PgConnection, sku: &str) -> sqlx::Result<()> {
    sqlx::query(UPDATE).bind(sku).execute(conn).await?;
    Ok(())
}

async fn no_op(Path(sku): Path<String>) -> StatusCode {
    std::hint::black_box(sku);
    StatusCode::NO_CONTENT
}

async fn update(State(pool): State<PgPool>, Path(sku): Path<String>) -> Answer {
    sqlx::query(UPDATE).bind(sku).execute(&pool).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn transaction(State(pool): State<PgPool>, Path(sku): Path<String>) -> Answer {
    let mut tx = pool.begin().await?;
    decrement(&mut tx, &sku).await?;
    tx.commit().await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn advisory_lock(State(pool): State<PgPool>, Path(sku): Path<String>) -> Answer {
    let mut tx = pool.begin().await?;
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))")
        .bind(&sku)
        .execute(&mut *tx)
        .await?;
    decrement(&mut tx, &sku).await?;
    tx.commit().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Write that compares the token with a column of the written row.
const VERSIONED_UPDATE: &str =
    "UPDATE stock SET n = n - 1, version = $2 WHERE sku = $1 AND version < $2";

async fn version_column(
    State(pool): State<PgPool>,
    headers: HeaderMap,
    Path(sku): Path<String>,
) -> Answer {
    let Some(token) = token(&headers) else {
        return Ok(StatusCode::PRECONDITION_REQUIRED);
    };
    let update = sqlx::query(VERSIONED_UPDATE).bind(sku).bind(token);
    Ok(match update.execute(&pool).await?.rows_affected() {
        1 => StatusCode::NO_CONTENT,
        _ => StatusCode::PRECONDITION_FAILED,
    })
}

async fn fenced(mut tx: PgFencedTx, Path(sku): Path<String>) -> Answer {
    decrement(&mut tx, &sku).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Form of the write that `Fence::write` requires.
const DEPENDENT_UPDATE: &str = "UPDATE stock SET n = n - 1 \
     WHERE sku = $1 AND EXISTS (SELECT 1 FROM fence) RETURNING n";

async fn one_statement(
    pending: PgPendingWrite,
    Path(sku): Path<String>,
) -> Result<StatusCode, WriteError> {
    let written: Vec<(i64,)> = pending
        .write(sqlx::query(DEPENDENT_UPDATE).bind(sku))
        .await?;
    Ok(match written.len() {
        1 => StatusCode::NO_CONTENT,
        _ => StatusCode::NOT_FOUND,
    })
}

async fn deferred(pending: PgPendingWrite, Path(sku): Path<String>) -> Result<Answer, Refusal> {
    let mut tx = pending.begin().await?;
    Ok(match decrement(&mut tx, &sku).await {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(error) => Err(error.into()),
    })
}

/// Returns the response to a stale token without checking a token.
async fn refusal(Path(sku): Path<String>) -> Problem {
    Problem::new(ProblemType::StaleToken)
        .detail(format!("token 1 for {sku} is not newer than {HIGHEST}"))
        .member("resource", sku)
        .member("presented_token", 1)
        .member("max_token", HIGHEST)
}

/// Handles a write with the handwritten check, in a transaction that sqlx begins.
async fn by_hand(
    State(pool): State<PgPool>,
    headers: HeaderMap,
    Path(sku): Path<String>,
) -> Answer {
    let mut tx = pool.begin().await?;
    let status = check_and_decrement(&mut tx, &headers, &sku).await?;
    if status.is_success() {
        tx.commit().await?;
    }
    Ok(status)
}

/// Handles a write with the handwritten check, in a transaction that another layer has begun.
async fn in_sqlx_tx(
    mut tx: axum_sqlx_tx::Tx<Postgres>,
    headers: HeaderMap,
    Path(sku): Path<String>,
) -> Answer {
    Ok(check_and_decrement(&mut tx, &headers, &sku).await?)
}

/// Returns the token of a request.
fn token(headers: &HeaderMap) -> Option<i64> {
    let token = headers.get("fencing-token")?;
    token.to_str().ok()?.parse().ok()
}

async fn check_and_decrement(
    conn: &mut PgConnection,
    headers: &HeaderMap,
    sku: &str,
) -> sqlx::Result<StatusCode> {
    let Some(token) = token(headers) else {
        return Ok(StatusCode::PRECONDITION_REQUIRED);
    };
    let admitted = sqlx::query(ADMIT)
        .bind(sku)
        .bind(token)
        // The check admits equal tokens, so that a token can be used for more than one write.
        .bind(token - 1)
        .execute(&mut *conn)
        .await?;
    if admitted.rows_affected() == 0 {
        return Ok(StatusCode::PRECONDITION_FAILED);
    }
    decrement(conn, sku).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn with_sqlx_tx(pool: &PgPool) -> Router {
    let (state, layer) = axum_sqlx_tx::Tx::<Postgres>::setup(pool.clone());
    at(in_sqlx_tx).layer(layer).with_state(state)
}

type Answer = Result<StatusCode, DatabaseError>;
