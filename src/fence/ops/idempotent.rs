//! Writes under an idempotency key. Each write is applied once, and each repetition gets the same
//! response.
//!
//! 1. The transaction of the write reserves the key in a record, before it takes the row lock of
//!    any resource. Another request with the same key waits for the record until the first request
//!    has ended.
//! 2. If the record already exists, no token is checked. A replay is therefore possible although
//!    the original write has used the token.
//! 3. The same transaction stores the response in the record. COMMIT publishes the write, the fence
//!    and the response together. A rollback leaves no record.

use std::{sync::Arc, time::Duration};

use super::transact::{Halt, Plan};
use crate::{
    fence::{
        Fence, FencedTx, TokenUse,
        claims::Claims,
        error::{AdmitError, CommitError},
        fault::{Fault, is_unprepared},
        local::QueueKey,
        settings::Limits,
        sql::{
            Admit, FenceDatabase, KeyedRequest, Record, Reservation, ReservedKey, StoredResponse,
        },
        tx::Transaction,
    },
    time::after,
};

/// Outcome of a request under an idempotency key.
#[expect(
    clippy::large_enum_variant,
    reason = "it is matched immediately, and is usually the largest variant"
)]
pub(crate) enum Once<DB: FenceDatabase> {
    /// The request is the first with this key. The response must be stored in this transaction.
    First(FencedTx<DB>),
    /// The request is a repetition. The first request got this response.
    Replay(StoredResponse),
    /// The key was used for another request.
    Mismatch,
    /// A request with this key is in progress.
    InFlight,
    /// The write of the first request was committed without its response.
    Unanswered,
}

/// Number of records that are removed in one transaction.
const BATCH: u32 = 1_000;

/// Upper bound of the minimum lifetime of a record: a day. Without this bound, records would never
/// expire if a timeout of the fence is practically infinite.
const LONGEST_MINIMUM: Duration = Duration::from_secs(24 * 60 * 60);

/// Longest lifetime of a record: a hundred years. Without this limit, a long `Duration` could
/// result in an invalid date.
const LONGEST_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

impl<DB: FenceDatabase> Fence<DB> {
    /// Opens a transaction, reserves the key in it and admits the claims. If the key already has a
    /// response, returns that response instead.
    pub(crate) async fn begin_once(
        &self,
        mut request: KeyedRequest,
        claims: Claims,
        token_use: TokenUse,
    ) -> Result<Once<DB>, AdmitError> {
        let wait = request.wait.unwrap_or(self.limits.lock_timeout);
        // Within this process, requests wait for each other without a connection, first for the key
        // and then for the resources. To avoid deadlocks, all requests wait in this order, here and
        // in the database.
        let key = QueueKey::Key(request.id.scope, request.id.key.clone());
        let Some(permit) = self.queues.wait(key, after(wait)).await else {
            return Ok(Once::InFlight);
        };
        // If the queue of a resource is occupied, look for the record first, because a replay does
        // not have to wait in the queue.
        let ordered = claims.in_lock_order();
        let mut permits = match self.wait_in_queues(&ordered, Duration::ZERO).await {
            Ok(permits) => permits,
            Err(_) => {
                if let Ok(Some(found)) = self.find_once(&request).await {
                    return Ok(found);
                }
                self.wait_in_queues(&ordered, self.limits.lock_timeout)
                    .await?
            }
        };
        permits.push(permit);
        let limits = Limits {
            key_timeout: Some(wait),
            ..self.limits
        };
        // A concurrent request must still find the record after this transaction.
        let longest = limits.locking(&claims).transaction_timeout();
        let ttl = request.ttl.max(longest.min(LONGEST_MINIMUM));
        request.ttl = ttl.clamp(Duration::from_millis(1), LONGEST_TTL);
        let plan = Plan::admitting(limits, &claims);
        let opened = self.open(plan, async |transaction| {
            let admit = Admit::new(ordered[0], token_use, transaction.limits());
            let early = transaction.began_early;
            let reservation =
                transaction.reserve(async |on| DB::admit_once(on, &request, admit, early).await);
            match reservation.await? {
                Reservation::Reserved { role, admission } => {
                    transaction.reserved_key = Some(Box::new(ReservedKey {
                        id: request.id.clone(),
                        role,
                    }));
                    let first = Some(admission);
                    let admitted =
                        self.admit_all(transaction, &ordered, token_use, token_use, first);
                    admitted.await?;
                    Ok(None)
                }
                Reservation::Found(found) => Ok(Some(found)),
                Reservation::TooEarly => Err(Halt::TooEarly),
            }
        });
        match opened.await {
            Ok((transaction, None)) => Ok(Once::First(FencedTx::new(transaction, claims, permits))),
            Ok((_, Some(Some(record)))) => Ok(Once::found(record, &request)),
            // The record expired between two statements of the reservation.
            Ok((_, Some(None))) => Ok(Once::InFlight),
            Err(AdmitError::Busy(cause))
                if Fault::of(&cause) == Fault::Contention && waits_for_key(&cause) =>
            {
                Ok(Once::InFlight)
            }
            Err(error) => Err(error),
        }
    }

    /// Looks up the record of a key without reserving the key. Returns `None` if the key has no
    /// record.
    pub(crate) async fn find_once(
        &self,
        request: &KeyedRequest,
    ) -> Result<Option<Once<DB>>, AdmitError> {
        let found = self.read(async |on| DB::find_record(on, &request.id).await);
        Ok(found.await?.map(|record| Once::found(record, request)))
    }

    /// Removes expired records of idempotency keys, and returns the number of removed records.
    ///
    /// An expired key counts as new whether or not its record still exists, so the removal only
    /// limits the size of the table. Call this method regularly, for example every hour, from one
    /// process or from all. It removes a thousand records at a time, each batch in its own
    /// transaction, and on Postgres it skips records that are in use.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`begin`](Self::begin) except [`AdmitError::Stale`].
    /// Batches that were already removed stay removed.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, only the committed batches are removed.
    pub async fn remove_expired_keys(&self) -> Result<u64, AdmitError> {
        let mut removed = 0;
        loop {
            let batch = self
                .in_transaction(self.limits, async |on| DB::remove_expired(on, BATCH).await)
                .await?;
            removed += batch;
            if batch < BATCH.into() {
                return Ok(removed);
            }
        }
    }
}

/// Returns whether a reservation timed out while it waited for the record of its key, not for the
/// row of a resource.
fn waits_for_key(cause: &sqlx::Error) -> bool {
    #[cfg(feature = "postgres")]
    if let Some(error) = cause.as_database_error()
        && let Some(error) = error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>()
    {
        return error
            .r#where()
            .is_some_and(|context| context.contains("idempotency_keys"));
    }
    // The reservation waited for the lock of SQLite's file, or the pool was exhausted.
    _ = cause;
    false
}

impl<DB: FenceDatabase> Once<DB> {
    /// Returns the outcome for a key that has a record. If the record has no response, the handler
    /// of the first request has committed its transaction with an SQL statement.
    fn found(record: Record, request: &KeyedRequest) -> Self {
        match record.response {
            _ if record.fingerprint != request.fingerprint => Self::Mismatch,
            Some(response) => Self::Replay(response),
            None => Self::Unanswered,
        }
    }
}

impl<DB: FenceDatabase> Transaction<DB> {
    /// Stores the response under the key that this transaction has reserved, and commits both.
    pub(crate) async fn commit_with(
        mut self,
        response: &StoredResponse,
    ) -> Result<(), CommitError> {
        let hooked = self.hooked;
        if let Some(reserved) = self.reserved_key.take() {
            let stored = self
                .run(async |on| {
                    if hooked {
                        DB::restore_role(on.conn, &reserved.role).await?;
                    }
                    DB::store_response(on, &reserved.id, response).await
                })
                .await
                // The handler has removed the prepared statements of its session, or has ended the
                // transaction behind a pooler.
                .map_err(|failure| match is_unprepared(&failure.cause) {
                    true => failure.with_fault(Fault::Refused),
                    false => failure,
                })
                .map_err(CommitError::before_commit)?;
            if !stored {
                let gone = "the idempotency record is missing: a statement of the handler has ended the transaction";
                return Err(CommitError::Aborted(Arc::new(sqlx::Error::Protocol(
                    gone.into(),
                ))));
            }
        }
        self.commit().await
    }
}
