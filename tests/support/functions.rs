//! The SQL functions of the fence, called as a program in another language calls them.

use serde_json::Value;
use sqlx::PgConnection;

/// The error of a function.
#[derive(Debug)]
pub struct Refused {
    pub code: String,
    pub message: String,
    pub hint: String,
    /// The DETAIL of the error, which is a JSON object, or null if the error has no DETAIL.
    pub problem: Value,
}

impl Refused {
    fn of(error: sqlx::Error) -> Self {
        let sqlx::Error::Database(error) = error else {
            panic!("{error:?}");
        };
        let error = error.downcast::<sqlx::postgres::PgDatabaseError>();
        let problem = error.detail().map(serde_json::from_str);
        Self {
            code: error.code().into(),
            message: error.message().into(),
            hint: error.hint().unwrap_or_default().into(),
            problem: problem.and_then(Result::ok).unwrap_or_default(),
        }
    }
}

pub async fn admit(
    conn: &mut PgConnection,
    resource: impl Into<Option<&str>>,
    token: impl Into<Option<i64>>,
) -> Result<i64, Refused> {
    let admitted = sqlx::query_scalar("SELECT tower_fence.admit($1, $2)")
        .bind(resource.into())
        .bind(token.into())
        .fetch_one(conn);
    admitted.await.map_err(Refused::of)
}

/// Admits a reusable token.
pub async fn admit_reusable(
    conn: &mut PgConnection,
    resource: &str,
    token: i64,
) -> Result<i64, Refused> {
    let admitted = sqlx::query_scalar("SELECT tower_fence.admit($1, $2, reusable => true)")
        .bind(resource)
        .bind(token)
        .fetch_one(conn);
    admitted.await.map_err(Refused::of)
}

pub async fn raise(
    conn: &mut PgConnection,
    resource: impl Into<Option<&str>>,
    token: impl Into<Option<i64>>,
) -> Result<i64, Refused> {
    let raised = sqlx::query_scalar("SELECT tower_fence.raise($1, $2)")
        .bind(resource.into())
        .bind(token.into())
        .fetch_one(conn);
    raised.await.map_err(Refused::of)
}

pub async fn max_token(
    conn: &mut PgConnection,
    resource: impl Into<Option<&str>>,
) -> Result<Option<i64>, Refused> {
    let max_token = sqlx::query_scalar("SELECT tower_fence.max_token($1)")
        .bind(resource.into())
        .fetch_one(conn);
    max_token.await.map_err(Refused::of)
}

/// The result of `tower_fence.acquire`.
#[derive(Debug)]
pub struct Acquired {
    pub lease_id: String,
    pub token: i64,
}

pub async fn acquire(
    conn: &mut PgConnection,
    resource: &str,
    ttl: &str,
) -> Result<Acquired, Refused> {
    acquire_as(conn, resource, ttl, None).await
}

/// Acquires with a lease id that the caller chooses.
pub async fn acquire_as(
    conn: &mut PgConnection,
    resource: &str,
    ttl: &str,
    lease_id: Option<&str>,
) -> Result<Acquired, Refused> {
    let acquired = sqlx::query_as("SELECT * FROM tower_fence.acquire($1, $2::text::interval, $3)")
        .bind(resource)
        .bind(ttl)
        .bind(lease_id)
        .fetch_one(conn);
    let (lease_id, token) = acquired.await.map_err(Refused::of)?;
    Ok(Acquired { lease_id, token })
}

pub async fn renew(
    conn: &mut PgConnection,
    resource: &str,
    lease_id: &str,
    ttl: &str,
    new_token: bool,
) -> Result<i64, Refused> {
    let renewed = sqlx::query_scalar("SELECT tower_fence.renew($1, $2, $3::text::interval, $4)")
        .bind(resource)
        .bind(lease_id)
        .bind(ttl)
        .bind(new_token)
        .fetch_one(conn);
    renewed.await.map_err(Refused::of)
}

pub async fn release(
    conn: &mut PgConnection,
    resource: &str,
    lease_id: &str,
) -> Result<(), Refused> {
    let released = sqlx::query("SELECT tower_fence.release($1, $2)")
        .bind(resource)
        .bind(lease_id)
        .execute(conn);
    released.await.map(drop).map_err(Refused::of)
}

#[track_caller]
pub fn is_refused<T: std::fmt::Debug>(outcome: Result<T, Refused>, code: &str) -> Refused {
    let refused = outcome.unwrap_err();
    assert_eq!(refused.code, code, "{refused:?}");
    refused
}

/// Runs statements, in the open transaction if there is one.
pub async fn execute(conn: &mut PgConnection, sql: &str) -> Result<(), Refused> {
    let sql = sqlx::AssertSqlSafe(sql.to_owned());
    let ran = sqlx::raw_sql(sql).execute(conn).await;
    ran.map(drop).map_err(Refused::of)
}

/// Runs statements in a transaction, which is rolled back if a statement fails.
pub async fn in_transaction(conn: &mut PgConnection, sql: &str) -> Result<(), Refused> {
    let ran = execute(conn, &format!("BEGIN; {sql}; COMMIT")).await;
    if ran.is_err() {
        execute(conn, "ROLLBACK").await.unwrap();
    }
    ran
}

/// Checks that statements in a transaction are refused with this SQLSTATE.
pub async fn refuses(conn: &mut PgConnection, sql: &str, code: &str) -> Refused {
    let outcome = in_transaction(conn, sql).await;
    assert_eq!(
        outcome.as_ref().err().map(|refused| &*refused.code),
        Some(code),
        "{sql}: {outcome:?}"
    );
    outcome.unwrap_err()
}
