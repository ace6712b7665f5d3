//! Helpers for tests that use the fence without HTTP.

use sqlx::Postgres;
use tokio::task::JoinHandle;
use tower_fence::{AdmitError, Fence, FencedTx, Resource, Token, TokenUse, fence::FenceDatabase};

use crate::database::TestDatabase;

pub fn token(value: i64) -> Token {
    Token::new(value).unwrap()
}

pub fn resource(name: &str) -> Resource {
    Resource::new(name).unwrap()
}

pub fn sku() -> Resource {
    resource("sku-1")
}

pub async fn begin<DB: FenceDatabase>(fence: &Fence<DB>, value: i64) -> FencedTx<DB> {
    fence
        .begin(&sku(), token(value), TokenUse::SingleUse)
        .await
        .unwrap()
}

/// Writes an entry under a single-use token.
pub async fn write<DB: TestDatabase>(fence: &Fence<DB>, value: i64) -> Result<(), AdmitError> {
    let mut tx = fence
        .begin(&sku(), token(value), TokenUse::SingleUse)
        .await?;
    insert(&mut tx, value).await;
    tx.commit().await.unwrap();
    Ok(())
}

/// Calls [`write`] in a task.
pub fn spawn_write<DB: TestDatabase>(
    fence: &Fence<DB>,
    value: i64,
) -> JoinHandle<Result<(), AdmitError>> {
    let fence = fence.clone();
    tokio::spawn(async move { write(&fence, value).await })
}

/// Commits a transaction under a single-use token, without a statement.
pub async fn use_up<DB: FenceDatabase>(
    fence: &Fence<DB>,
    resource: &Resource,
    token: Token,
) -> Result<(), AdmitError> {
    let tx = fence.begin(resource, token, TokenUse::SingleUse).await?;
    tx.commit().await.unwrap();
    Ok(())
}

/// Writes an entry under a single-use token, in one statement.
pub async fn write_at_once(fence: &Fence<Postgres>, resource: &Resource, value: i64) {
    let query = sqlx::query("INSERT INTO ledger SELECT $1 FROM fence RETURNING entry").bind(value);
    let written = fence.write::<(i64,)>(resource, token(value), TokenUse::SingleUse, query);
    assert_eq!(written.await.unwrap(), [(value,)]);
}

/// Checks that [`write`] is refused, with this highest stale token.
pub async fn refuses<DB: TestDatabase>(fence: &Fence<DB>, value: i64, max_token: i64) {
    is_stale(write(fence, value).await, value, max_token);
}

pub async fn insert<DB: TestDatabase>(tx: &mut FencedTx<DB>, entry: i64) {
    DB::run(tx, &format!("INSERT INTO ledger VALUES ({entry})")).await;
}

#[track_caller]
pub fn is_stale<T>(outcome: Result<T, AdmitError>, presented: i64, max_token: i64) {
    match outcome {
        Err(AdmitError::Stale(refused)) => assert_eq!(
            (refused.resource, refused.presented_token, refused.max_token),
            (sku(), token(presented), max_token)
        ),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("token {presented} was admitted"),
    }
}
