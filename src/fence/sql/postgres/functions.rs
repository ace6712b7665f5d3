//! Calls of the fence's SQL functions.

use sqlx::PgConnection;

use crate::{
    announce::LeaseDigest,
    fence::sql::{Announcement, Dead, Idle, Names},
    token::{Resource, Token},
};

/// Implements [`Backend::catch_up`](crate::fence::sql::Backend::catch_up).
pub(super) async fn catch_up(
    conn: &mut PgConnection,
    names: &Names,
    resource: &Resource,
) -> sqlx::Result<bool> {
    sqlx::query_scalar(names.sql("SELECT tower_fence.catch_up($1)"))
        .bind(resource.as_str())
        .fetch_one(conn)
        .await
}

/// Implements [`Backend::after_failover`](crate::fence::sql::Backend::after_failover).
pub(super) async fn after_failover(
    conn: &mut PgConnection,
    names: &Names,
    partition: u8,
) -> sqlx::Result<()> {
    if names.is_distributed() {
        // Update all partitions together, because each worker has rows of all partitions.
        if partition == 0 {
            let all = sqlx::query(names.sql("SELECT tower_fence.after_failover()"));
            all.execute(conn).await?;
        }
        return Ok(());
    }
    sqlx::query(names.sql("SELECT tower_fence.after_failover_of($1)"))
        .bind(i16::from(partition))
        .execute(conn)
        .await?;
    Ok(())
}

/// Implements [`Backend::raise`](crate::fence::sql::Backend::raise).
pub(super) async fn raise(
    conn: &mut PgConnection,
    names: &Names,
    resource: &Resource,
    token: Token,
) -> sqlx::Result<Option<Dead>> {
    const RAISE: &str =
        "SELECT a.outcome, a.max_token, a.by_floor FROM tower_fence.try_raise($1, $2) AS a";
    let answer: (String, i64, bool) = sqlx::query_as(names.sql(RAISE))
        .bind(resource.as_str())
        .bind(token.get())
        .fetch_one(conn)
        .await?;
    let (outcome, max_token, by_floor) = answer;
    let dead = Dead {
        max_token,
        by_floor,
        announced: false,
    };
    Ok((outcome != "behind").then_some(dead))
}

/// Implements [`Backend::max_token`](crate::fence::sql::Backend::max_token).
pub(super) async fn max_token(
    conn: &mut PgConnection,
    names: &Names,
    resource: &Resource,
) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar(names.sql("SELECT tower_fence.max_token($1)"))
        .bind(resource.as_str())
        .fetch_one(conn)
        .await
}

/// Implements [`Backend::remove_idle`](crate::fence::sql::Backend::remove_idle).
pub(super) async fn remove_idle(
    conn: &mut PgConnection,
    names: &Names,
    partition: u8,
    idle: Idle,
) -> sqlx::Result<u64> {
    const REMOVE: &str = "SELECT tower_fence.remove_idle_of($1, $2 * interval '1 s', $3, $4, $5)";
    let removed: i32 = sqlx::query_scalar(names.sql(REMOVE))
        .bind(i16::from(partition))
        .bind(idle.older_than.as_secs_f64())
        .bind(i32::try_from(idle.at_most).unwrap_or(i32::MAX))
        .bind(idle.granted.map(Token::get))
        .bind(idle.live.map(Token::get))
        .fetch_one(conn)
        .await?;
    Ok(removed.unsigned_abs().into())
}

/// Implements [`Backend::announce`](crate::fence::sql::Backend::announce).
pub(super) async fn announce(
    conn: &mut PgConnection,
    names: &Names,
    resource: &Resource,
    token: Token,
    lease: &LeaseDigest,
) -> sqlx::Result<Announcement> {
    const ANNOUNCE: &str =
        "SELECT a.outcome, a.highest, a.was_last FROM tower_fence.announce($1, $2, $3) AS a";
    let answer: (String, Option<i64>, bool) = sqlx::query_as(names.sql(ANNOUNCE))
        .bind(resource.as_str())
        .bind(token.get())
        .bind(&lease.as_bytes()[..])
        .fetch_one(conn)
        .await?;
    Ok(match answer {
        (outcome, ..) if outcome == "announced" => Announcement::Announced,
        (outcome, Some(highest), was_last) if outcome == "outranked" => {
            Announcement::Outranked { highest, was_last }
        }
        _ => Announcement::Behind,
    })
}

/// Implements [`Backend::reset`](crate::fence::sql::Backend::reset).
pub(super) async fn reset(
    conn: &mut PgConnection,
    names: &Names,
    resource: &Resource,
    token: Token,
) -> sqlx::Result<i64> {
    sqlx::query_scalar(names.sql("SELECT tower_fence.reset($1, $2)"))
        .bind(resource.as_str())
        .bind(token.get())
        .fetch_one(conn)
        .await
}

/// Implements [`Backend::next_epoch`](crate::fence::sql::Backend::next_epoch).
pub(super) async fn next_epoch(
    conn: &mut PgConnection,
    names: &Names,
    partition: u8,
    at_least: i64,
) -> sqlx::Result<i64> {
    sqlx::query_scalar(names.sql("SELECT tower_fence.next_epoch($1, $2)"))
        .bind(i16::from(partition))
        .bind(at_least)
        .fetch_one(conn)
        .await
}

/// Implements [`Backend::report_epoch`](crate::fence::sql::Backend::report_epoch).
pub(super) async fn report_epoch(
    conn: &mut PgConnection,
    names: &Names,
    partition: u8,
    seen: i64,
) -> sqlx::Result<i64> {
    sqlx::query_scalar(names.sql("SELECT tower_fence.report_epoch($1, $2)"))
        .bind(i16::from(partition))
        .bind(seen)
        .fetch_one(conn)
        .await
}
