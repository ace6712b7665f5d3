//! A write that is repeated under an idempotency key: it happens once, and is answered the same
//! way every time.
//!
//! 1. The record of the key is claimed in the transaction of the write, before any row lock of a
//!    resource is taken. A request with the same key waits here for the first to end.
//! 2. Where there is a record, nothing else is looked at: a replay works although its token was used
//!    up by the very write that is repeated.
//! 3. The response goes into the record in the same transaction. A COMMIT makes all of it true at
//!    once: the write, the fence, and the answer. A rollback leaves no record.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::transact::{Plan, Step};
use crate::fence::{
    Fence, FencedTx, TokenUse,
    claims::Claims,
    error::{AdmitError, CommitError},
    fault::Fault,
    local::QueueKey,
    settings::deadline,
    sql::{Admit, ClaimOfKey, Claimed, Claiming, FenceDatabase, Record, RecordId, StoredResponse},
    tx::Transaction,
};

/// What a request under an idempotency key asks for.
pub(crate) struct KeyedRequest {
    pub(crate) id: RecordId,
    /// SHA-256 of the request.
    pub(crate) fingerprint: [u8; 32],
    /// How long the record is good.
    pub(crate) ttl: Duration,
    /// How long to wait for a request with the same key; as for any lock where it does not say.
    pub(crate) wait: Option<Duration>,
}

/// What a request under an idempotency key gets.
#[expect(
    clippy::large_enum_variant,
    reason = "it is matched at once, and mostly is the largest"
)]
pub(crate) enum Once<DB: FenceDatabase> {
    /// It is the first: a transaction whose response must be stored at its COMMIT.
    First(FencedTx<DB>),
    /// It was made before.
    Replay(StoredResponse),
}

/// Why a request under an idempotency key gets neither. Nothing was written.
#[derive(Debug)]
pub(crate) enum OnceError {
    /// The key was used for another request.
    Mismatch,
    /// A request with this key is under way.
    InFlight,
    Admit(AdmitError),
}

impl From<AdmitError> for OnceError {
    fn from(error: AdmitError) -> Self {
        Self::Admit(error)
    }
}

/// How many records are removed in one transaction.
const BATCH: u32 = 1_000;

/// A hundred years, so that any `Duration` gives a date.
const LONGEST_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

impl<DB: FenceDatabase> Fence<DB> {
    /// Opens a transaction, claims the key in it, and admits what is to be admitted; or finds what
    /// was answered before.
    pub(crate) async fn begin_once(
        &self,
        request: KeyedRequest,
        claims: Claims,
        token_use: TokenUse,
    ) -> Result<Once<DB>, OnceError> {
        let KeyedRequest {
            id,
            fingerprint,
            ttl,
            wait,
        } = request;
        let wait = wait.unwrap_or(self.limits.lock_timeout);
        // In this process they wait for each other without a connection: first for the key, then for
        // the resources. Everybody takes them in this order, here and in the database.
        let key = QueueKey::Key(id.scope, id.key.clone());
        let permit = self.queues.wait(key, deadline(wait)).await;
        let permit = permit.ok_or(OnceError::InFlight)?;
        // Where others write to the resource, look first: what was answered before needs no place in
        // a queue.
        let mut permits = match self.wait_in_queues_until(&claims, Instant::now()).await {
            Ok(permits) => permits,
            Err(_) => {
                let found = self.find(&id).await?;
                if found
                    .as_ref()
                    .is_some_and(|record| record.response.is_some())
                {
                    return replay(found, fingerprint);
                }
                self.wait_in_queues(&claims).await?
            }
        };
        permits.push(permit);
        let ttl_ms = ttl.min(LONGEST_TTL).as_millis() as i64;
        let [first, ..] = claims.in_lock_order()[..] else {
            return Err(AdmitError::NoResource.into());
        };
        let plan = Plan::admitting(self.limits, &claims).under_key(wait);
        let opened = self.open(plan, async |transaction, names| {
            let claim = ClaimOfKey {
                id: &id,
                fingerprint: &fingerprint,
                ttl_ms,
                early: transaction.began_early,
                admit: Admit::new(first, token_use, transaction.bounds),
            };
            let claiming = transaction.claim(async |conn| DB::admit_once(conn, names, claim).await);
            Ok(match claiming.await? {
                Claiming::Claimed { role, admission } => {
                    transaction.claimed = Some(Box::new(Claimed {
                        id: id.clone(),
                        names: Arc::clone(&self.names),
                        role,
                    }));
                    let admission = Some(admission);
                    match self
                        .admit_all(transaction, names, &claims, token_use, admission)
                        .await?
                    {
                        Step::Done(admitted) => Step::Done(Ok(admitted)),
                        Step::TooEarly => Step::TooEarly,
                        Step::Behind => Step::Behind,
                    }
                }
                Claiming::Found(found) => Step::Done(Err(found)),
                Claiming::TooEarly => Step::TooEarly,
            })
        });
        match opened.await {
            Ok((transaction, Ok(admitted))) => {
                admitted.map_err(AdmitError::from)?;
                Ok(Once::First(FencedTx::new(transaction, claims, permits)))
            }
            Ok((_, Err(found))) => replay(found, fingerprint),
            Err(AdmitError::Busy(cause))
                if Fault::of(&cause) == Fault::Contention && waits_for_key(&cause) =>
            {
                Err(OnceError::InFlight)
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn find(&self, id: &RecordId) -> Result<Option<Record>, AdmitError> {
        self.read(async |conn, names| DB::find_record(conn, names, id).await)
            .await
    }

    /// Finds what was answered under a key before, without claiming it; nothing where the request
    /// would be the first, or is under way.
    pub(crate) async fn answered(
        &self,
        request: &KeyedRequest,
    ) -> Result<Option<StoredResponse>, OnceError> {
        let found = self.find(&request.id).await?;
        match replay::<DB>(found, request.fingerprint) {
            Ok(Once::Replay(stored)) => Ok(Some(stored)),
            Ok(Once::First(_)) | Err(OnceError::InFlight) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes the records of idempotency keys whose time is over, and returns how many.
    ///
    /// An expired key counts as new whether its record is still there or not, so this only keeps
    /// the table small: call it from time to time, every hour say, from one process or from all.
    /// It removes a thousand at a time, each batch in a transaction of its own, and on Postgres
    /// passes over records that are in use, so that no write waits for it for long.
    ///
    /// # Errors
    ///
    /// [`AdmitError::Busy`] or [`AdmitError::Unavailable`], as [`begin`](Self::begin). The batches
    /// before it are removed.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any moment, the batches that were committed are removed, and nothing else is.
    pub async fn remove_expired_keys(&self) -> Result<u64, AdmitError> {
        let mut removed = 0;
        loop {
            let batch = self
                .in_transaction(async |conn, names| DB::remove_expired(conn, names, BATCH).await)
                .await?;
            removed += batch;
            if batch < BATCH.into() {
                return Ok(removed);
            }
        }
    }
}

/// Whether a claim has waited in vain for its key, and not for the row of a resource.
fn waits_for_key(cause: &sqlx::Error) -> bool {
    #[cfg(feature = "postgres")]
    if let Some(error) = cause.as_database_error()
        && let Some(error) = error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>()
    {
        return error
            .r#where()
            .is_some_and(|context| context.contains("idempotency_keys"));
    }
    // The lock of SQLite's file, or a pool that is full.
    _ = cause;
    false
}

fn replay<DB: FenceDatabase>(
    found: Option<Record>,
    fingerprint: [u8; 32],
) -> Result<Once<DB>, OnceError> {
    match found {
        Some(record) if record.fingerprint != fingerprint => Err(OnceError::Mismatch),
        Some(Record {
            response: Some(response),
            ..
        }) => Ok(Once::Replay(response)),
        // A handler committed by hand: what was to be answered, nobody knows. Or, between the two
        // statements, an operator removed the record by hand.
        Some(_) | None => Err(OnceError::InFlight),
    }
}

impl<DB: FenceDatabase> Transaction<DB> {
    /// Stores the response in the record that this transaction has claimed, and commits both.
    pub(crate) async fn commit_with(
        mut self,
        response: &StoredResponse,
    ) -> Result<(), CommitError> {
        let hooked = self.hooked;
        if let Some(claimed) = self.claimed.take() {
            let stored = self
                .run(async |conn| {
                    if hooked {
                        DB::restore_role(conn, &claimed.role).await?;
                    }
                    DB::store_response(conn, &claimed.names, &claimed.id, response).await
                })
                .await
                .map_err(CommitError::before_commit)?;
            if !stored {
                let gone =
                    "the record of the idempotency key is gone: the transaction was ended by hand";
                return Err(CommitError::Aborted(Arc::new(sqlx::Error::Protocol(
                    gone.into(),
                ))));
            }
        }
        self.commit().await
    }
}
