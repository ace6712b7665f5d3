//! Tokens are admitted in a transaction that is open, or that began ahead.
//!
//! 1. A transaction that began ahead of its request saves a round trip. It is used where nothing
//!    speaks against it: each token is admitted, and no resource was written to since it began.
//! 2. Otherwise another one begins, and says why a token is refused.

use tokio::time::Instant;

use super::{
    Fence, TokenUse,
    admitted::{Admitted, AllAdmitted},
    database::{Admission, FenceDatabase},
    error::{AdmitError, Stale},
    session::{self, Session},
    tables::Tables,
    tx::FencedTx,
};
use crate::token::{Resource, Token};

impl<DB: FenceDatabase> Fence<DB> {
    /// Opens a transaction and admits what is to be admitted.
    pub(crate) async fn begin_admitted(
        &self,
        all: AllAdmitted,
        token_use: TokenUse,
    ) -> Result<FencedTx<DB>, AdmitError> {
        self.check_dead(&all)?;
        let turns = self.turns(&all).await?;
        let session = Session::begin(&self.connections, self.limits).await?;
        let mut tx = self.admit_all(session, all, token_use).await?;
        tx.turns = turns;
        Ok(tx)
    }

    /// Admits in an open transaction, row lock by row lock.
    pub(super) async fn admit_all(
        &self,
        mut session: Session<DB>,
        all: AllAdmitted,
        token_use: TokenUse,
    ) -> Result<FencedTx<DB>, AdmitError> {
        let tables = self.tables(&mut session).await?;
        if session.ahead {
            let began = Instant::now();
            match self
                .admit_ahead(&mut session, &tables, &all, token_use)
                .await
            {
                Ok(true) => {
                    self.run_hook(&mut session).await?;
                    return Ok(FencedTx::new(session, all, None));
                }
                Ok(false) => session.restart_after(began.elapsed()).await?,
                // It had died since it was used last, and nothing was written.
                Err(AdmitError::Unavailable(error)) if session::is_gone::<DB>(&error) => {
                    session.discard();
                    session = Session::begin_tested(&self.connections, self.limits, None).await?;
                }
                Err(error) => return Err(error),
            }
        }
        for Admitted { resource, token } in all.in_lock_order() {
            let floor = token_use.floor(*token);
            let lock = session.lock();
            let admission = session
                .run(async |conn| DB::admit(conn, &tables, resource, *token, floor, lock).await)
                .await?;
            admitted(admission, resource, *token).inspect_err(|stale| {
                // What this very transaction has moved is rolled back with it.
                if all.iter().filter(|one| one.resource == *resource).count() == 1 {
                    self.dead.remember(stale);
                }
            })?;
        }
        self.run_hook(&mut session).await?;
        Ok(FencedTx::new(session, all, None))
    }

    /// Admits all or not all, in a transaction that began ahead of the request.
    async fn admit_ahead(
        &self,
        session: &mut Session<DB>,
        tables: &Tables,
        all: &AllAdmitted,
        token_use: TokenUse,
    ) -> Result<bool, AdmitError> {
        for Admitted { resource, token } in all.in_lock_order() {
            let floor = token_use.floor(*token);
            let lock = session.lock();
            let admitted = session
                .run(async |conn| {
                    DB::admit_ahead(conn, tables, resource, *token, floor, lock).await
                })
                .await?;
            if !admitted {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The refusal, where a token was not admitted.
pub(super) fn admitted(
    admission: Admission,
    resource: &Resource,
    token: Token,
) -> Result<(), Stale> {
    match admission {
        Admission::Admitted => Ok(()),
        Admission::Stale { max_token } => Err(Stale {
            resource: resource.clone(),
            presented: token,
            max_token,
        }),
    }
}
