//! Hook of [`FenceLayer::on_begin`](super::FenceLayer::on_begin), which runs in each fenced
//! transaction.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use http::request::Parts;
use tokio::time::timeout;

use super::refusal::Refusal;
use crate::fence::{FenceDatabase, FencedTx};

/// The application's function of the request and the connection.
pub(super) type Hook<DB> = Arc<
    dyn for<'a> Fn(
            &'a Parts,
            &'a mut <DB as sqlx::Database>::Connection,
        ) -> BoxFuture<'a, sqlx::Result<()>>
        + Send
        + Sync,
>;

/// Runs the hook in a transaction that has begun. If the hook fails, the transaction is rolled back
/// and the fence is unchanged, because the handler has not run.
pub(super) async fn run<DB: FenceDatabase>(
    hook: &Hook<DB>,
    parts: &Parts,
    mut tx: FencedTx<DB>,
    hold: Duration,
) -> Result<FencedTx<DB>, Refusal> {
    let within = tx.left_of(hold);
    match timeout(within, hook(parts, tx.connection_mut())).await {
        Ok(Ok(())) if tx.is_outermost().await => Ok(tx),
        Ok(Ok(())) => Err(Refusal::OnBegin(Arc::new(sqlx::Error::Configuration(
            "the hook has ended the transaction, or has left a nested transaction open".into(),
        )))),
        Ok(Err(error)) => Err(Refusal::OnBegin(Arc::new(error))),
        Err(_) => Err(Refusal::OnBeginTimeout(hold)),
    }
}
