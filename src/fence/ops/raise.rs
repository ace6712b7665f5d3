//! Raises of the fence, which make older tokens stale without a write.

use tokio::{runtime::Handle, task::JoinHandle};
use tracing::Instrument;

use super::transact::{Halt, Plan};
use crate::{
    chain::Chain,
    fence::{
        Fence, TokenUse,
        claims::Claims,
        error::{AdmitError, StaleToken},
        fault::Failure,
        sql::{FenceDatabase, TransactionId},
        tx::{Session, Transaction},
    },
    token::{Resource, Token},
};

impl<DB: FenceDatabase> Fence<DB> {
    /// Makes every token older than `token` stale, without a write. Waits for a write that is in
    /// progress.
    ///
    /// Call this when a lease is granted, or before a read if no older holder may write after the
    /// read.
    ///
    /// # Errors
    ///
    /// Returns [`AdmitError::Stale`] if `token` itself is stale, [`AdmitError::Busy`] or
    /// [`AdmitError::Unavailable`] if the COMMIT failed, and otherwise the errors of
    /// [`begin`](Self::begin).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, no open transaction and no lock remain.
    pub async fn raise(&self, resource: &Resource, token: Token) -> Result<(), AdmitError> {
        let one = Claims::one(resource.clone(), token);
        self.refuse_stale(&one, TokenUse::Reusable)?;
        let (ordered, within) = (one.in_lock_order(), self.limits.lock_timeout);
        let _permits = self.wait_in_queues(&ordered, within).await?;
        match self.raise_claims(None, &one).await? {
            Some(stale) => Err(stale.into()),
            None => Ok(()),
        }
    }

    /// Rolls back the writes under admitted tokens, and then raises the fence, because the rollback
    /// has also undone the raise of the admission.
    pub(crate) async fn roll_back_and_raise(
        &self,
        mut transaction: Transaction<DB>,
        claims: &Claims,
    ) -> Result<(), AdmitError> {
        let restarted = transaction.restart(self.limits.locking(claims)).await;
        // If the connection is lost, the transaction is dropped here, which releases its permit of
        // the pool.
        let open = restarted.is_ok().then_some(transaction);
        self.raise_claims(open, claims).await.map(drop)
    }

    /// Raises the fence for tokens whose transaction is no longer accessible.
    pub(crate) async fn raise_after_loss(&self, claims: &Claims) -> Result<(), AdmitError> {
        // Do not wait in the queues, because the inaccessible transaction may still hold the
        // permits.
        self.raise_claims(None, claims).await.map(drop)
    }

    /// Terminates, in a task of its own, a transaction that a task of the application still holds
    /// after its request has ended, so that the fence can be raised. The request may be dropped in
    /// the meantime. If this fails, the transaction ends after its timeouts.
    pub(crate) fn terminate(&self, id: Option<TransactionId>) -> Option<JoinHandle<()>> {
        let runtime = Handle::try_current().ok()?;
        let (fence, id) = (self.clone(), id?);
        let terminate = async move {
            Session::standalone(&fence.connections, fence.limits)
                .await?
                .commit_alone(fence.limits.statement_timeout(), async |on| {
                    DB::terminate(on.conn, id).await
                })
                .await
        };
        let terminating = async {
            if let Err(Failure { cause, .. }) = terminate.await {
                tracing::error!(
                    error = Chain(&cause).to_string(),
                    "cannot end an escaped transaction"
                );
            }
        };
        Some(runtime.spawn(terminating.in_current_span()))
    }

    /// Raises the fence for all claims in one transaction, in the open one if there is one.
    ///
    /// Returns the refusal of the first token that turns out to be stale. The fence of its resource
    /// is already higher than this raise requires, and the other resources are raised nevertheless.
    async fn raise_claims(
        &self,
        open: Option<Transaction<DB>>,
        claims: &Claims,
    ) -> Result<Option<StaleToken>, AdmitError> {
        let mut plan = Plan::locking(self.limits, claims);
        plan.open = open;
        let (transaction, refusal) = self
            .open(plan, async |transaction| {
                let mut refusal = None;
                for claim in claims.in_lock_order() {
                    let raise = transaction.run(async |on| DB::raise(on, claim).await);
                    let Some(stale) = raise.await? else {
                        return Err(Halt::Behind);
                    };
                    if stale.max_token >= claim.token.get() {
                        refusal.get_or_insert_with(|| stale.refuse(claim, TokenUse::Reusable));
                    }
                }
                Ok(refusal)
            })
            .await?;
        transaction.commit().await.map_err(AdmitError::at_commit)?;
        Ok(refusal)
    }
}
