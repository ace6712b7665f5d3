//! Operations on the fence's tables, by calls to its SQL functions.

use sqlx::{Postgres, SqlSafeStr};

use crate::{
    announce::LeaseDigest,
    fence::Claim,
    fence::sql::{Announcement, HighestStale, Idle, On, StateRow, Tables, states::states},
    token::{Resource, Token},
};

impl Tables for Postgres {
    async fn raise(
        On { conn, names }: On<'_, Self>,
        claim: &Claim,
    ) -> sqlx::Result<Option<HighestStale>> {
        const RAISE: &str =
            "SELECT a.outcome, a.max_token, a.by_floor FROM tower_fence.try_raise($1, $2) AS a";
        let answer: (String, i64, bool) = sqlx::query_as(names.sql(RAISE))
            .bind(claim.resource.as_str())
            .bind(claim.token.get())
            .fetch_one(conn)
            .await?;
        let (outcome, max_token, by_floor) = answer;
        let stale = HighestStale {
            max_token,
            by_floor,
            announced: false,
        };
        Ok((outcome != "behind").then_some(stale))
    }

    async fn max_token(
        On { conn, names }: On<'_, Self>,
        resource: &Resource,
    ) -> sqlx::Result<Option<i64>> {
        sqlx::query_scalar(names.sql("SELECT tower_fence.max_token($1)"))
            .bind(resource.as_str())
            .fetch_one(conn)
            .await
    }

    async fn announce(
        On { conn, names }: On<'_, Self>,
        claim: &Claim,
        lease: &LeaseDigest,
        renews: bool,
    ) -> sqlx::Result<Announcement> {
        const ANNOUNCE: &str = "SELECT a.outcome, a.highest, a.was_last FROM tower_fence.announce($1, $2, $3, $4) AS a";
        let answer: (String, Option<i64>, bool) = sqlx::query_as(names.sql(ANNOUNCE))
            .bind(claim.resource.as_str())
            .bind(claim.token.get())
            .bind(&lease.as_bytes()[..])
            .bind(renews)
            .fetch_one(conn)
            .await?;
        Ok(match answer {
            (outcome, ..) if outcome == "announced" => Announcement::Announced,
            (outcome, Some(highest), was_last) if outcome == "superseded" => {
                Announcement::Superseded { highest, was_last }
            }
            _ => Announcement::Behind,
        })
    }

    async fn reset(On { conn, names }: On<'_, Self>, claim: &Claim) -> sqlx::Result<i64> {
        sqlx::query_scalar(names.sql("SELECT tower_fence.reset($1, $2)"))
            .bind(claim.resource.as_str())
            .bind(claim.token.get())
            .fetch_one(conn)
            .await
    }

    async fn catch_up(On { conn, names }: On<'_, Self>, resource: &Resource) -> sqlx::Result<bool> {
        sqlx::query_scalar(names.sql("SELECT tower_fence.catch_up($1)"))
            .bind(resource.as_str())
            .fetch_one(conn)
            .await
    }

    async fn after_failover(On { conn, names }: On<'_, Self>) -> sqlx::Result<bool> {
        sqlx::query_scalar(names.sql("SELECT tower_fence.after_failover()"))
            .fetch_one(conn)
            .await
    }

    async fn remove_idle(
        On { conn, names }: On<'_, Self>,
        partition: u8,
        idle: Idle,
    ) -> sqlx::Result<u64> {
        if names.is_distributed() {
            let refused = "a distributed fence cannot remove the rows of idle resources";
            return Err(sqlx::Error::Configuration(refused.into()));
        }
        const REMOVE: &str =
            "SELECT tower_fence.remove_idle_of($1, $2 * interval '1 s', $3, $4, $5)";
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

    async fn next_epoch(
        On { conn, names }: On<'_, Self>,
        partition: u8,
        at_least: i64,
    ) -> sqlx::Result<i64> {
        sqlx::query_scalar(names.sql("SELECT tower_fence.next_epoch($1, $2)"))
            .bind(i16::from(partition))
            .bind(at_least)
            .fetch_one(conn)
            .await
    }

    async fn report_epoch(
        On { conn, names }: On<'_, Self>,
        partition: u8,
        seen: i64,
    ) -> sqlx::Result<i64> {
        sqlx::query_scalar(names.sql("SELECT tower_fence.report_epoch($1, $2)"))
            .bind(i16::from(partition))
            .bind(seen)
            .fetch_one(conn)
            .await
    }

    async fn has_leases(On { conn, names }: On<'_, Self>, partition: u8) -> sqlx::Result<bool> {
        const HAS: &str =
            "SELECT EXISTS (SELECT FROM tower_fence.epochs WHERE partition = $1 AND leases_in > 0)";
        sqlx::query_scalar(names.sql(HAS))
            .bind(i16::from(partition))
            .fetch_one(conn)
            .await
    }

    states!(idle_ms: "CAST(extract(epoch FROM clock_timestamp() - updated_at) * 1000 AS bigint)");
}
