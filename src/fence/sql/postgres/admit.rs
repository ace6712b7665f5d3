//! Admission of a token.
//!
//! If the resource has a row, one prepared statement admits the token and sets the timeouts of the
//! transaction. If that statement matches no row (the first write to a resource, a stale token, a
//! failover, the first token above the announced one), the SQL function `try_admit` decides.

use sqlx::Postgres;

use super::transaction::{Settings, set_timeouts};
use crate::fence::sql::{Admission, Admissions, Admit, HighestStale, On, TransactionId};

impl Admissions for Postgres {
    async fn admit(
        On { conn, names }: On<'_, Self>,
        admit: Admit<'_>,
        early: bool,
    ) -> sqlx::Result<Admission> {
        // The arguments from the fourth to the eighth are settings of the transaction. The subquery
        // that applies them does not depend on a row, so Postgres evaluates it before the row is
        // locked, and the new `lock_timeout` limits the wait for the row lock. Separate statements
        // for the settings would cost more than the admission.
        const ADMIT: &str = concat!(
            "UPDATE tower_fence.resources SET max_token = $3, updated_at = CURRENT_TIMESTAMP, \
             admitted_by = pg_catalog.pg_current_xact_id() \
             WHERE resource = $1 AND max_token < $2 AND history = tower_fence.current_history() \
             AND (announced >= $2 OR announced_lease IS NULL) \
             AND (NOT $9 OR updated_at <= CURRENT_TIMESTAMP) AND (SELECT ",
            set_timeouts!("$4", "$5", "$6", "$7"),
            " || CASE WHEN $8 AND pg_catalog.current_setting('synchronous_commit') IN ('off', 'local') \
                 THEN pg_catalog.set_config('synchronous_commit', 'on', true) ELSE '' END) IS NOT NULL \
             RETURNING admitted_by::text::bigint"
        );
        if names.is_distributed() {
            return match early {
                // Only the worker knows the time of the last write to the resource, so no early
                // transaction can be used.
                true => Ok(Admission::TooEarly),
                false => admit_on_worker(On::new(conn, names), admit).await,
            };
        }
        let settings = Settings::of(admit.limits, conn.server_version_num());
        let id = sqlx::query_scalar(names.sql(ADMIT))
            .bind(admit.claim.resource.as_str())
            .bind(admit.claim.token.get())
            .bind(admit.raised_to())
            .bind(settings.lock_ms)
            .bind(settings.statement_ms)
            .bind(settings.idle_ms)
            .bind(settings.transaction_ms)
            .bind(admit.limits.durable)
            .bind(early)
            .fetch_optional(&mut *conn)
            .await?;
        match id {
            Some(id) => Ok(Admission::Admitted(Some(TransactionId(id)))),
            None if early => Ok(Admission::TooEarly),
            None => Self::admit_only(On::new(conn, names), admit).await,
        }
    }

    async fn admit_only(
        On { conn, names }: On<'_, Self>,
        admit: Admit<'_>,
    ) -> sqlx::Result<Admission> {
        const TRY: &str = "SELECT a.outcome, a.max_token, a.by_floor, a.announced, \
             pg_catalog.pg_current_xact_id_if_assigned()::text::bigint FROM tower_fence.try_admit($1, $2, $3) AS a";
        if names.is_distributed() {
            return delegate(On::new(conn, names), admit).await;
        }
        let answer: (String, i64, bool, bool, Option<i64>) = sqlx::query_as(names.sql(TRY))
            .bind(admit.claim.resource.as_str())
            .bind(admit.claim.token.get())
            .bind(admit.is_reusable())
            .fetch_one(conn)
            .await?;
        let (outcome, max_token, by_floor, announced, id) = answer;
        Ok(admission((outcome, max_token, by_floor, announced), id))
    }
}

/// Converts the answer of `try_admit`, or of a function with the same outcomes.
pub(super) fn admission(answer: (String, i64, bool, bool), id: Option<i64>) -> Admission {
    let (outcome, max_token, by_floor, announced) = answer;
    match &*outcome {
        "admitted" => Admission::Admitted(id.map(TransactionId)),
        "stale" => Admission::Stale(HighestStale {
            max_token,
            by_floor,
            announced,
        }),
        _ => Admission::Behind,
    }
}

/// Admits a token on a distributed fence. Citus delegates a statement to the worker only if the
/// statement consists only of the function call. Therefore a separate statement sets the timeouts
/// on the coordinator, and the function sets those on the worker. The transaction id of the worker
/// is not returned, because it has no meaning on the coordinator.
async fn admit_on_worker(
    On { conn, names }: On<'_, Postgres>,
    admit: Admit<'_>,
) -> sqlx::Result<Admission> {
    const LIMITS: &str = concat!("SELECT ", set_timeouts!("$1", "$2", "$3", "$4"));
    let settings = Settings::of(admit.limits, conn.server_version_num());
    sqlx::query(LIMITS)
        .bind(settings.lock_ms)
        .bind(settings.statement_ms)
        .bind(settings.idle_ms)
        .bind(settings.transaction_ms)
        .execute(&mut *conn)
        .await?;
    delegate(On::new(conn, names), admit).await
}

/// Admits the token on the worker, and sets the timeouts of the transaction there.
pub(super) async fn delegate(
    On { conn, names }: On<'_, Postgres>,
    admit: Admit<'_>,
) -> sqlx::Result<Admission> {
    const ADMIT: &str = "SELECT a.outcome, a.max_token, a.by_floor, a.announced \
         FROM tower_fence.admit_within($1, $2, $3, $4, $5, $6) AS a";
    let settings = Settings::of(admit.limits, conn.server_version_num());
    let answer = sqlx::query_as(names.sql(ADMIT))
        .bind(admit.claim.resource.as_str())
        .bind(admit.claim.token.get())
        .bind(admit.is_reusable())
        .bind(settings.lock_ms)
        .bind(settings.idle_ms)
        .bind(admit.limits.durable)
        .fetch_one(conn)
        .await?;
    Ok(admission(answer, None))
}
