//! The statements on the records of idempotency keys.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use sqlx::Database;

use super::{AdvisoryLock, Tables};

/// Which record: the key, and what it belongs to.
#[derive(Clone, Debug)]
pub(crate) struct RecordId {
    /// SHA-256 of the names that the key belongs to: they may be many, an index entry is small.
    pub scope: [u8; 32],
    pub key: String,
}

/// A response as it is stored. Of HTTP the fence knows no more than this.
#[derive(Clone, Debug)]
pub(crate) struct StoredResponse {
    pub status: u16,
    pub headers: Vec<u8>,
    pub body: Bytes,
}

/// A record that a transaction has claimed, and that waits for its response.
pub(crate) struct Claimed {
    pub(in crate::fence) id: RecordId,
    pub(in crate::fence) tables: Arc<Tables>,
    /// As whom the transaction began. The application may go on as another one, who need not have
    /// any right to the fence's tables.
    pub(in crate::fence) role: String,
}

/// A record that is there.
pub(crate) struct Record {
    pub fingerprint: Vec<u8>,
    /// `None` where the transaction that claimed the key was committed by hand.
    pub response: Option<StoredResponse>,
}

/// The statements.
pub(crate) trait Records: Database {
    /// Makes a record without a response, unless there is one that is still good; waits for the
    /// transaction of another request that does the same. Returns as which role it was made; nothing where there
    /// is a record. From then on locks are waited for as long as `lock_wait`.
    fn claim(
        conn: &mut Self::Connection,
        tables: &Tables,
        id: &RecordId,
        fingerprint: &[u8; 32],
        ttl_ms: i64,
        lock: AdvisoryLock,
        lock_wait: Duration,
    ) -> impl Future<Output = sqlx::Result<Option<String>>> + Send;

    /// Reads a record that is still good.
    fn find(
        conn: &mut Self::Connection,
        tables: &Tables,
        id: &RecordId,
    ) -> impl Future<Output = sqlx::Result<Option<Record>>> + Send;

    /// Goes on as the role as which the transaction began, whatever the application has made of it.
    fn restore_role(
        conn: &mut Self::Connection,
        role: &str,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Adds the response to the record that this transaction has claimed; false where there is
    /// none.
    fn store(
        conn: &mut Self::Connection,
        claimed: &Claimed,
        response: &StoredResponse,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Removes records whose time is over, and returns how many.
    fn remove_expired(
        conn: &mut Self::Connection,
        tables: &Tables,
        at_most: i64,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;
}

/// The macro writes the statements once per database, since sqlx's types differ.
macro_rules! records {
    (
        now: $now:literal,
        expires_at: $expires_at:literal,
        claimed: $claimed:literal,
        skip_locked: $skip_locked:literal $(,)?
    ) => {
        async fn claim(
            conn: &mut Self::Connection,
            tables: &Tables,
            id: &RecordId,
            fingerprint: &[u8; 32],
            ttl_ms: i64,
            lock: AdvisoryLock,
            lock_wait: Duration,
        ) -> sqlx::Result<Option<String>> {
            const CLAIM: &str = concat!(
                "INSERT INTO {schema}.fence_idempotency_keys AS k (scope, key, fingerprint, expires_at) \
                 VALUES ($1, $2, $3, ",
                $expires_at,
                ") ON CONFLICT (scope, key) DO UPDATE \
                 SET fingerprint = excluded.fingerprint, expires_at = excluded.expires_at, \
                     status = NULL, headers = NULL, body = NULL \
                 WHERE k.expires_at <= ",
                $now,
                " RETURNING ",
                $claimed
            );
            let lock_ms = lock_wait.as_millis().clamp(1, i32::MAX as u128);
            sqlx::query_scalar(tables.sql(CLAIM))
                .bind(&id.scope[..])
                .bind(&id.key)
                .bind(&fingerprint[..])
                .bind(ttl_ms)
                .bind(format!("{lock_ms}ms"))
                .bind(lock.0)
                .fetch_optional(conn)
                .await
        }

        async fn find(
            conn: &mut Self::Connection,
            tables: &Tables,
            id: &RecordId,
        ) -> sqlx::Result<Option<Record>> {
            type Row = (Vec<u8>, Option<i16>, Option<Vec<u8>>, Option<Vec<u8>>);
            const FIND: &str = concat!(
                "SELECT fingerprint, status, headers, body \
                 FROM {schema}.fence_idempotency_keys WHERE scope = $1 AND key = $2 AND expires_at > ",
                $now
            );
            let row: Option<Row> = sqlx::query_as(tables.sql(FIND))
                .bind(&id.scope[..])
                .bind(&id.key)
                .fetch_optional(conn)
                .await?;
            Ok(row.map(|(fingerprint, status, headers, body)| Record {
                fingerprint,
                response: status.map(|status| StoredResponse {
                    status: status.unsigned_abs(),
                    headers: headers.unwrap_or_default(),
                    body: body.unwrap_or_default().into(),
                }),
            }))
        }

        async fn store(
            conn: &mut Self::Connection,
            claimed: &Claimed,
            response: &StoredResponse,
        ) -> sqlx::Result<bool> {
            const STORE: &str = "UPDATE {schema}.fence_idempotency_keys \
                 SET status = $3, headers = $4, body = $5 \
                 WHERE scope = $1 AND key = $2 AND status IS NULL";
            Self::restore_role(conn, &claimed.role).await?;
            let stored = sqlx::query(claimed.tables.sql(STORE))
                .bind(&claimed.id.scope[..])
                .bind(&claimed.id.key)
                .bind(response.status.cast_signed())
                .bind(&response.headers)
                .bind(&response.body[..])
                .execute(conn)
                .await?;
            Ok(stored.rows_affected() == 1)
        }

        async fn remove_expired(
            conn: &mut Self::Connection,
            tables: &Tables,
            at_most: i64,
        ) -> sqlx::Result<u64> {
            const REMOVE: &str = concat!(
                "DELETE FROM {schema}.fence_idempotency_keys WHERE (scope, key) IN (\
                 SELECT scope, key FROM {schema}.fence_idempotency_keys WHERE expires_at <= ",
                $now,
                " ORDER BY expires_at LIMIT $1 ",
                $skip_locked,
                ")"
            );
            let removed = sqlx::query(tables.sql(REMOVE)).bind(at_most).execute(conn).await?;
            Ok(removed.rows_affected())
        }
    };
}

pub(super) use records;
