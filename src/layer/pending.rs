//! [`PendingWrite`]: a write whose token has not been admitted yet.

use std::{fmt, sync::Arc, time::Duration};

use axum::extract::FromRequestParts;
use derive_where::derive_where;
use http::request::Parts;
use sqlx::{Execute, FromRow};

use super::{
    extract::{NoTransaction, Passed},
    on_begin::{self, Hook},
    refusal::{Refusal, problem_of_statement},
    report,
};
use crate::{
    fence::{
        AdmitError, Claim, CommitError, Fence, FenceDatabase, FencedTx, Slot, Statement, TokenUse,
        WriteError, Written, typed,
    },
    problem::ProblemType,
};

/// Write that a handler behind a [deferred](super::FenceLayer::deferred) layer has yet to begin.
///
/// The handler can write once: with [`begin`](Self::begin) in a transaction, or with
/// [`write`](Self::write) as a single statement ([examples](crate::guide::ways_to_write)). If a
/// handler returns a success without using its `PendingWrite`, the layer responds with 500 instead.
/// If the request has an idempotency key, the layer itself admits the token before the handler
/// runs, and commits such a success.
#[derive_where(Clone)]
pub struct PendingWrite<DB: FenceDatabase> {
    fence: Fence<DB>,
    token_use: TokenUse,
    slot: Slot<DB>,
    /// The hook, and the request for which it runs.
    on_begin: Option<(Hook<DB>, Arc<Parts>)>,
}

/// Additional time for the hook, which runs inside the handler. Normally the handler's timeout
/// passes first and determines the response. This later timeout takes effect only if the handler
/// begins its transaction in a separate task.
const SLACK: Duration = Duration::from_secs(1);

/// [`PendingWrite`] on Postgres.
#[cfg(feature = "postgres")]
pub type PgPendingWrite = PendingWrite<sqlx::Postgres>;

/// [`PendingWrite`] on SQLite.
#[cfg(feature = "sqlite")]
pub type SqlitePendingWrite = PendingWrite<sqlx::Sqlite>;

impl<DB: FenceDatabase> PendingWrite<DB> {
    pub(super) const fn new(
        fence: Fence<DB>,
        token_use: TokenUse,
        slot: Slot<DB>,
        on_begin: Option<(Hook<DB>, Arc<Parts>)>,
    ) -> Self {
        Self {
            fence,
            token_use,
            slot,
            on_begin,
        }
    }

    /// Returns the claim to be admitted, or the first one if there are several.
    #[must_use]
    pub fn claim(&self) -> &Claim {
        self.slot.claims().first()
    }

    /// Returns all claims to be admitted.
    #[must_use]
    pub fn claims(&self) -> &[Claim] {
        self.slot.claims()
    }

    /// Opens a transaction and admits the token in it. The layer then treats the transaction like
    /// one that the layer has opened itself, and commits it after a success.
    ///
    /// # Errors
    ///
    /// Returns the [`Refusal`] with which the layer itself would have responded: stale, busy or
    /// unavailable, or a failure of [the hook](super::FenceLayer::on_begin). Returns
    /// [`CommitError::Escaped`] if the request has already begun its write. The handler can return
    /// the refusal as its response.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, it leaves no open transaction and no lock.
    pub async fn begin(self) -> Result<FencedTx<DB>, Refusal> {
        if let Some(tx) = self.begun_by_layer() {
            return Ok(tx);
        }
        if !self.slot.start_begin() {
            return Err(CommitError::Escaped.into());
        }
        let tx = self.open().await?;
        report::admitted(self.slot.claims(), false);
        let lent = tx.begun_for(&self.slot);
        lent.ok_or_else(|| CommitError::Escaped.into())
    }

    /// Returns the transaction that the layer has begun, if the request has an idempotency key.
    /// Without a key, a transaction in the slot belongs to an earlier call to the handler, and must
    /// not be used again.
    fn begun_by_layer(&self) -> Option<FencedTx<DB>> {
        let has_key = self.slot.has_key();
        has_key.then(|| FencedTx::borrow(&self.slot)).flatten()
    }

    /// Opens a transaction, admits the claims in it, and runs the hook. Reports a failure to the
    /// layer.
    async fn open(&self) -> Result<FencedTx<DB>, Refusal> {
        let claims = self.slot.claims().clone();
        let begun = self.fence.begin_admitted(claims, self.token_use, false);
        let opened = match (begun.await, &self.on_begin) {
            (Ok(tx), Some((hook, parts))) => {
                let hold = self.fence.limits().hold_timeout.saturating_add(SLACK);
                on_begin::run(hook, parts, tx, hold).await
            }
            (begun, _) => begun.map_err(Refusal::from),
        };
        opened.inspect_err(|refusal| {
            self.slot.refuse(match not_opened(refusal) {
                WriteError::Admit(error) => error,
                // A statement of the hook failed, and the fence is unchanged.
                other => {
                    AdmitError::Unavailable(Arc::new(sqlx::Error::Protocol(other.to_string())))
                }
            });
        })
    }

    /// Runs a single statement together with the admission of the token. On Postgres, the fence
    /// combines both into one statement, which commits by itself. See [`Fence::write`] for the
    /// required form of the statement, and for the reason why this is safe.
    ///
    /// If the statement returns rows, its changes are committed, whatever response the handler
    /// returns. If the request names several resources, or the layer has a
    /// [hook](super::FenceLayer::on_begin), the statement runs in an open transaction instead.
    ///
    /// Under an idempotency key, the statement runs in the request's transaction, as with a
    /// [`FencedTx`](crate::FencedTx). If the handler succeeds, the layer commits the statement
    /// together with the response, whether or not the statement has returned rows. Otherwise the
    /// layer rolls the statement back.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Fence::write`]. The handler can return a [`WriteError`] as its
    /// response.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped while the statement runs, the outcome of the statement is unknown.
    /// If the handler then returns a success, the response is 503, unless the request has an
    /// idempotency key: in that case, the layer commits or refuses the write as if the call had
    /// returned. No connection and no lock leaks.
    pub async fn write<'q, T>(self, query: impl Execute<'q, DB>) -> Result<Vec<T>, WriteError>
    where
        T: for<'r> FromRow<'r, DB::Row>,
    {
        let mut statement = Statement::new(query)?;
        if let Some(mut tx) = self.begun_by_layer() {
            return typed(tx.write(&mut statement).await?);
        }
        if !self.slot.start_begin() {
            return Err(CommitError::Escaped.into());
        }
        // The hook needs an open transaction, in which the statement then runs.
        let hooked = match self.on_begin.is_some() {
            true => Some(self.open().await.map_err(|refusal| not_opened(&refusal))?),
            false => None,
        };
        if !self.slot.start_write() {
            return Err(CommitError::Escaped.into());
        }
        let is_admitted = hooked.is_some();
        let written = match hooked {
            Some(tx) => tx.write_and_commit(statement).await,
            None => {
                let claims = self.slot.claims().clone();
                let written = self
                    .fence
                    .admit_and_write(claims, self.token_use, statement);
                written.await
            }
        };
        let written = written.inspect_err(|error| self.failed(error, is_admitted))?;
        report::admitted(self.slot.claims(), false);
        match written {
            Written::Rows(rows) => {
                self.slot.settle(Ok(()));
                typed(rows)
            }
            Written::Nothing(tx) => {
                tx.wrote_nothing_for(&self.slot);
                Ok(Vec::new())
            }
        }
    }

    /// Reports a failed write to the layer. If the token was admitted and the statement failed, the
    /// layer raises the fence. If the error is an [`AdmitError`], the layer leaves the fence
    /// unchanged, because a 503 response guarantees nothing about older tokens. If the hook has run
    /// in the transaction (`is_admitted`), it may have read data, so the layer also raises the
    /// fence after these errors.
    fn failed(&self, error: &WriteError, is_admitted: bool) {
        match error {
            WriteError::Admit(AdmitError::Busy(cause)) if is_admitted => {
                self.slot.settle(Err(CommitError::Busy(cause.clone())));
            }
            WriteError::Admit(AdmitError::Unavailable(cause)) if is_admitted => {
                let unavailable = CommitError::Unavailable(cause.clone());
                self.slot.settle(Err(unavailable));
            }
            WriteError::Admit(error) => self.slot.refuse(error.clone()),
            WriteError::Statement(cause) | WriteError::Unsupported(cause) => {
                let aborted = CommitError::Aborted(cause.clone());
                self.slot.settle(Err(aborted));
            }
            WriteError::Commit(error) => self.slot.settle(Err(error.clone())),
            WriteError::Independent | WriteError::Rows(_) => {}
        }
    }
}

/// Converts the refusal to open a transaction into the error of the handler's write.
fn not_opened(refusal: &Refusal) -> WriteError {
    match refusal {
        Refusal::Admit(error) => error.clone().into(),
        Refusal::OnBegin(error) => match problem_of_statement(error) {
            ProblemType::FenceBusy => AdmitError::Busy(error.clone()).into(),
            ProblemType::StoreUnavailable => AdmitError::Unavailable(error.clone()).into(),
            _ => WriteError::Statement(error.clone()),
        },
        other => {
            let error = sqlx::Error::Protocol(other.to_string());
            AdmitError::Unavailable(Arc::new(error)).into()
        }
    }
}

impl<DB: FenceDatabase> fmt::Debug for PendingWrite<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingWrite")
            .field("claims", self.slot.claims())
            .finish_non_exhaustive()
    }
}

impl<DB: FenceDatabase, S: Sync> FromRequestParts<S> for PendingWrite<DB> {
    type Rejection = NoTransaction;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        if let Some(pending) = parts.extensions.remove::<Self>() {
            return Ok(pending);
        }
        if parts.extensions.get::<Slot<DB>>().is_none() {
            return Err(NoTransaction::without_layer::<DB>(parts));
        }
        Err(match parts.extensions.get() {
            Some(Passed::Fenced { deferred: true, .. }) => NoTransaction::InUse,
            _ => NoTransaction::NotDeferred,
        })
    }
}
