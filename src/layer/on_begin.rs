//! Hook of [`FenceLayer::on_begin`](super::FenceLayer::on_begin), which runs in each fenced
//! transaction.

use std::{sync::Arc, time::Duration};

use derive_where::derive_where;
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

/// Additional time for the hook of a deferred write, which runs inside the handler. Normally the
/// handler's timeout passes first and determines the response. This later timeout takes effect only
/// if the handler begins its transaction in a separate task.
const SLACK: Duration = Duration::from_secs(1);

/// The hook, and the request for which it runs.
#[derive_where(Clone)]
pub(super) struct OnBegin<DB: FenceDatabase> {
    hook: Hook<DB>,
    parts: Arc<Parts>,
}

impl<DB: FenceDatabase> OnBegin<DB> {
    pub(super) fn new(hook: &Hook<DB>, parts: &Parts) -> Self {
        Self {
            hook: Arc::clone(hook),
            parts: Arc::new(parts.clone()),
        }
    }

    /// Runs the hook in the transaction of a deferred write.
    pub(super) async fn run(
        &self,
        tx: FencedTx<DB>,
        hold: Duration,
    ) -> Result<FencedTx<DB>, Refusal> {
        run(&self.hook, &self.parts, tx, hold.saturating_add(SLACK)).await
    }
}

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
