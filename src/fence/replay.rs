//! A write that is repeated under an idempotency key: it happens once, and is answered the same
//! way every time.
//!
//! 1. The record of the key is claimed in the transaction of the write, before any row lock of a
//!    resource is taken. Whoever comes with the same key waits here for the first to end.
//! 2. Where there is a record, nothing else is looked at: a replay works although its token was used
//!    up by the very write that is repeated.
//! 3. The response goes into the record in the same transaction. A COMMIT makes all of it true at
//!    once: the write, the fence, and the answer. A rollback leaves no record.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Fence, TokenUse,
    admitted::AllAdmitted,
    database::{Fault, FenceDatabase},
    error::{AdmitError, CommitError},
    limits::deadline,
    queue::Wanted,
    raise::commit,
    records::{Claimed, Record, RecordId, StoredResponse},
    session::Session,
    tx::FencedTx,
};

/// What a request under an idempotency key asks for.
pub(crate) struct Claim {
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
        claim: Claim,
        all: AllAdmitted,
        token_use: TokenUse,
    ) -> Result<Once<DB>, OnceError> {
        let Claim {
            id,
            fingerprint,
            ttl,
            wait,
        } = claim;
        let wait = wait.unwrap_or(self.limits.lock_wait);
        // In this process they wait for each other without a connection: first for the key, then for
        // the resources. Everybody takes them in this order, here and in the database.
        let wanted = Wanted::Key(id.scope, id.key.clone());
        let turn = self.queues.turn(wanted, deadline(wait)).await;
        let turn = turn.ok_or(OnceError::InFlight)?;
        // Where others write to the resource, look first: what was answered before needs no turn.
        let mut turns = match self.turns_until(&all, Instant::now()).await {
            Ok(turns) => turns,
            Err(_) => {
                let mut session = Session::begin(&self.connections, self.limits).await?;
                let found = self.find(&mut session, &id).await?;
                if found
                    .as_ref()
                    .is_some_and(|record| record.response.is_some())
                {
                    return replay(found, fingerprint);
                }
                drop(session);
                self.turns(&all).await?
            }
        };
        turns.push(turn);
        let mut session =
            Session::begin_for_key(&self.connections, self.limits, Some(wait)).await?;
        let tables = self.tables(&mut session).await?;
        let ttl_ms = ttl.min(LONGEST_TTL).as_millis() as i64;
        let lock_wait = self.limits.lock_wait;
        let within = wait.saturating_add(self.limits.answer_wait);
        let lock = session.lock();
        let claimed = session
            .run_within(within, async |conn| {
                DB::claim(conn, &tables, &id, &fingerprint, ttl_ms, lock, lock_wait).await
            })
            .await;
        match claimed {
            Ok(Some(role)) => {
                session.claimed = Some(Box::new(Claimed { id, tables, role }));
                let mut tx = self.admit_all(session, all, token_use).await?;
                tx.turns = turns;
                Ok(Once::First(tx))
            }
            Ok(None) => {
                let found = self.find(&mut session, &id).await?;
                replay(found, fingerprint)
            }
            // The only lock that a claim waits for is that of the same key.
            Err(AdmitError::Busy(_)) => Err(OnceError::InFlight),
            Err(error) => Err(error.into()),
        }
    }

    async fn find(
        &self,
        session: &mut Session<DB>,
        id: &RecordId,
    ) -> Result<Option<Record>, AdmitError> {
        let tables = self.tables(session).await?;
        let find = session.run(async |conn| DB::find(conn, &tables, id).await);
        find.await
    }

    /// Finds what was answered under a key before, without claiming it; nothing where the request
    /// would be the first, or is under way.
    pub(crate) async fn answered(
        &self,
        claim: &Claim,
    ) -> Result<Option<StoredResponse>, OnceError> {
        let mut session = Session::begin(&self.connections, self.limits).await?;
        let found = self.find(&mut session, &claim.id).await?;
        match replay::<DB>(found, claim.fingerprint) {
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
            let mut session = Session::begin(&self.connections, self.limits).await?;
            let tables = self.tables(&mut session).await?;
            let batch = session
                .run(async |conn| DB::remove_expired(conn, &tables, BATCH.into()).await)
                .await?;
            commit(session).await?;
            removed += batch;
            if batch < BATCH.into() {
                return Ok(removed);
            }
        }
    }
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
        // statements, somebody removed the record by hand.
        Some(_) | None => Err(OnceError::InFlight),
    }
}

impl<DB: FenceDatabase> FencedTx<DB> {
    /// Stores the response in the record that this transaction has claimed, and commits both.
    pub(crate) async fn commit_with(
        mut self,
        response: &StoredResponse,
    ) -> Result<(), CommitError> {
        let Some(mut session) = self.take_session() else {
            return Err(CommitError::Unfinished);
        };
        if let Some(claimed) = session.claimed.take() {
            let stored = session
                .run(async |conn| DB::store(conn, &claimed, response).await)
                .await
                .map_err(not_stored::<DB>)?;
            if !stored {
                let gone =
                    "the record of the idempotency key is gone: the transaction was ended by hand";
                return Err(CommitError::Aborted(Arc::new(sqlx::Error::Protocol(
                    gone.into(),
                ))));
            }
        }
        session.commit().await
    }
}

/// COMMIT was not sent yet, so nothing was written.
fn not_stored<DB: FenceDatabase>(error: AdmitError) -> CommitError {
    match error {
        AdmitError::Busy(cause) => CommitError::Busy(cause),
        AdmitError::Unavailable(cause) if matches!(DB::fault(&cause), Fault::Refused) => {
            CommitError::Aborted(cause)
        }
        AdmitError::Unavailable(cause) => CommitError::Unavailable(cause),
        AdmitError::Hook(cause) => CommitError::Aborted(cause),
        AdmitError::Stale(_) | AdmitError::NoResource => CommitError::Unfinished,
    }
}
