//! Idempotency keys. The statement that admits the token also reserves the key, or finds the stored
//! response.

use sqlx::{Postgres, Row, postgres::PgRow};

use super::{
    admit::{admission, delegate},
    transaction::{Settings, set_timeouts},
};
use crate::fence::{
    settings::millis,
    sql::{Admit, KeyedRequest, On, Record, RecordId, Records, Reservation, StoredResponse},
};

impl Records for Postgres {
    async fn admit_once(
        On { conn, names }: On<'_, Self>,
        request: &KeyedRequest,
        admit: Admit<'_>,
        early: bool,
    ) -> sqlx::Result<Reservation> {
        // An argument of the function depends on the result of `set_config`, so Postgres applies
        // the settings before it calls the function.
        const RESERVE: &str = concat!(
            "SELECT a.*, pg_catalog.pg_current_xact_id_if_assigned()::text::bigint AS id FROM (SELECT (",
            set_timeouts!("$10", "$11", "$12", "$13"),
            ") IS NOT NULL AS made OFFSET 0) AS settings, LATERAL tower_fence.admit_once(\
                 CASE WHEN settings.made THEN $1 END, $2, $3, $4, $5, $6, $7, $8, $9) AS a"
        );
        let is_distributed = names.is_distributed();
        if is_distributed && early {
            // now() may be before the last write to the resource, whose time only the worker knows.
            return Ok(Reservation::TooEarly);
        }
        let settings = Settings::of(admit.limits, conn.server_version_num());
        let key_timeout = admit.limits.key_timeout;
        let key_ms = key_timeout.map_or_else(|| settings.lock_ms.clone(), millis);
        // On a distributed fence, the function only reserves the key, and the worker admits the
        // token.
        let resource = (!is_distributed).then(|| admit.claim.resource.as_str());
        let row = sqlx::query(names.sql(RESERVE))
            .bind(&request.id.scope[..])
            .bind(&request.id.key)
            .bind(&request.fingerprint[..])
            .bind(request.ttl.as_millis() as i64)
            .bind(settings.lock_ms)
            .bind(early)
            .bind(resource)
            .bind(admit.claim.token.get())
            .bind(admit.is_reusable())
            .bind(key_ms)
            .bind(settings.statement_ms)
            .bind(settings.idle_ms)
            .bind(settings.transaction_ms)
            .fetch_one(&mut *conn)
            .await?;
        if is_distributed && row.try_get::<&str, _>("outcome")? == "claimed" {
            let (role, admission) = (
                row.try_get("role")?,
                delegate(On::new(conn, names), admit).await?,
            );
            return Ok(Reservation::Reserved { role, admission });
        }
        reservation(&row)
    }

    async fn find_record(
        On { conn, names }: On<'_, Self>,
        id: &RecordId,
    ) -> sqlx::Result<Option<Record>> {
        const FIND: &str = "SELECT f.fingerprint, f.status, f.headers, f.body FROM tower_fence.find_response($1, $2) AS f";
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
        sqlx::query_scalar(names.sql("SELECT tower_fence.store_response($1, $2, $3, $4, $5)"))
            .bind(&id.scope[..])
            .bind(&id.key)
            .bind(response.status.cast_signed())
            .bind(&response.headers)
            .bind(&response.body[..])
            .fetch_one(conn)
            .await
    }

    async fn remove_expired(On { conn, names }: On<'_, Self>, at_most: u32) -> sqlx::Result<u64> {
        let removed: i32 =
            sqlx::query_scalar(names.sql("SELECT tower_fence.remove_expired_keys($1)"))
                .bind(i32::try_from(at_most).unwrap_or(i32::MAX))
                .fetch_one(conn)
                .await?;
        Ok(removed.unsigned_abs().into())
    }
}

fn reservation(row: &PgRow) -> sqlx::Result<Reservation> {
    let outcome: String = row.try_get("outcome")?;
    if outcome == "found" {
        let fingerprint: Option<Vec<u8>> = row.try_get("found_fingerprint")?;
        let (status, headers, body) = (
            row.try_get("status")?,
            row.try_get("headers")?,
            row.try_get("body")?,
        );
        let record = |fingerprint| Record::of((fingerprint, status, headers, body));
        return Ok(Reservation::Found(fingerprint.map(record)));
    }
    if outcome == "early" {
        return Ok(Reservation::TooEarly);
    }
    let (max_token, by_floor) = (row.try_get("max_token")?, row.try_get("by_floor")?);
    let answer = (outcome, max_token, by_floor, row.try_get("announced")?);
    Ok(Reservation::Reserved {
        role: row.try_get("role")?,
        admission: admission(answer, row.try_get("id")?),
    })
}
