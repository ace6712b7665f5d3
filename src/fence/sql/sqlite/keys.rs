//! Idempotency keys.

use sqlx::Sqlite;

use crate::fence::sql::{
    Admissions, Admit, KeyedRequest, On, Record, RecordId, Records, Reservation, StoredResponse,
};

impl Records for Sqlite {
    async fn admit_once(
        On { conn, names }: On<'_, Self>,
        request: &KeyedRequest,
        admit: Admit<'_>,
        _early: bool,
    ) -> sqlx::Result<Reservation> {
        const RESERVE: &str = "INSERT INTO tower_fence.idempotency_keys AS k (scope, key, fingerprint, expires_at) \
             VALUES ($1, $2, $3, CAST(unixepoch('subsec') * 1000 AS INTEGER) + $4) \
             ON CONFLICT (scope, key) DO UPDATE SET fingerprint = excluded.fingerprint, \
                 expires_at = excluded.expires_at, status = NULL, headers = NULL, body = NULL \
             WHERE k.expires_at <= CAST(unixepoch('subsec') * 1000 AS INTEGER)";
        let reserved = sqlx::query(names.sql(RESERVE))
            .bind(&request.id.scope[..])
            .bind(&request.id.key)
            .bind(&request.fingerprint[..])
            .bind(request.ttl.as_millis() as i64)
            .execute(&mut *conn);
        if reserved.await?.rows_affected() == 0 {
            let found = Self::find_record(On::new(conn, names), &request.id).await?;
            return Ok(Reservation::Found(found));
        }
        Ok(Reservation::Reserved {
            role: String::new(),
            admission: Self::admit(On::new(conn, names), admit, false).await?,
        })
    }

    async fn find_record(
        On { conn, names }: On<'_, Self>,
        id: &RecordId,
    ) -> sqlx::Result<Option<Record>> {
        const FIND: &str = "SELECT fingerprint, status, headers, body FROM tower_fence.idempotency_keys \
             WHERE scope = $1 AND key = $2 AND expires_at > CAST(unixepoch('subsec') * 1000 AS INTEGER)";
        let row = sqlx::query_as(names.sql(FIND))
            .bind(&id.scope[..])
            .bind(&id.key)
            .fetch_optional(conn)
            .await?;
        Ok(row.map(Record::of))
    }

    async fn store_response(
        On { conn, names }: On<'_, Self>,
        id: &RecordId,
        response: &StoredResponse,
    ) -> sqlx::Result<bool> {
        const STORE: &str = "UPDATE tower_fence.idempotency_keys SET status = $3, headers = $4, body = $5 \
             WHERE scope = $1 AND key = $2 AND status IS NULL";
        let stored = sqlx::query(names.sql(STORE))
            .bind(&id.scope[..])
            .bind(&id.key)
            .bind(response.status.cast_signed())
            .bind(&response.headers)
            .bind(&response.body[..])
            .execute(conn)
            .await?;
        Ok(stored.rows_affected() == 1)
    }

    async fn remove_expired(On { conn, names }: On<'_, Self>, at_most: u32) -> sqlx::Result<u64> {
        const REMOVE: &str = "DELETE FROM tower_fence.idempotency_keys WHERE (scope, key) IN (\
             SELECT scope, key FROM tower_fence.idempotency_keys \
             WHERE expires_at <= CAST(unixepoch('subsec') * 1000 AS INTEGER) ORDER BY expires_at LIMIT $1)";
        let removed = sqlx::query(names.sql(REMOVE)).bind(at_most).execute(conn);
        Ok(removed.await?.rows_affected())
    }
}
