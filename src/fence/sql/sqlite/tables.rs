//! Operations on the fence's tables.

use sqlx::{SqlSafeStr, Sqlite};

use super::admit::highest_stale;
use crate::{
    announce::LeaseDigest,
    epochs::{Epoch, partition_of},
    fence::{
        claims::{Claim, TokenUse},
        sql::{Announcement, HighestStale, Idle, On, StateRow, Tables, states::states},
    },
    token::{Resource, Token},
};

impl Tables for Sqlite {
    async fn raise(
        On { conn, names }: On<'_, Self>,
        claim: &Claim,
    ) -> sqlx::Result<Option<HighestStale>> {
        const RAISE: &str = "INSERT INTO tower_fence.resources AS r \
                 (resource, max_token, updated_at, partition) \
             SELECT $1, $2, CURRENT_TIMESTAMP, $3 FROM tower_fence.floors WHERE partition = $3 \
                 AND ($2 >= floor OR EXISTS (SELECT 1 FROM tower_fence.resources WHERE resource = $1)) \
             ON CONFLICT (resource) DO UPDATE \
                 SET max_token = excluded.max_token, updated_at = excluded.updated_at, \
                     announced_lease = CASE WHEN r.announced > excluded.max_token THEN r.announced_lease END \
                 WHERE r.max_token < excluded.max_token OR (r.max_token = excluded.max_token \
                     AND r.announced <= r.max_token AND r.announced_lease IS NOT NULL)";
        sqlx::query(names.sql(RAISE))
            .bind(claim.resource.as_str())
            .bind(TokenUse::Reusable.highest_stale(claim.token))
            .bind(i16::from(partition_of(&claim.resource)))
            .execute(&mut *conn)
            .await?;
        highest_stale(On::new(conn, names), &claim.resource)
            .await
            .map(Some)
    }

    async fn max_token(
        On { conn, names }: On<'_, Self>,
        resource: &Resource,
    ) -> sqlx::Result<Option<i64>> {
        let stale = highest_stale(On::new(conn, names), resource).await?;
        Ok((stale.max_token > 0 || !stale.by_floor).then_some(stale.max_token))
    }

    async fn announce(
        On { conn, names }: On<'_, Self>,
        claim: &Claim,
        lease: &LeaseDigest,
        renews: bool,
    ) -> sqlx::Result<Announcement> {
        const ANNOUNCE: &str = "INSERT INTO tower_fence.resources AS r \
                 (resource, max_token, announced, announced_lease, updated_at, partition) \
             SELECT $1, $2 - 1, $2, $3, CURRENT_TIMESTAMP, $4 FROM tower_fence.floors WHERE partition = $4 \
                 AND ($2 > floor OR EXISTS (SELECT 1 FROM tower_fence.resources WHERE resource = $1)) \
             ON CONFLICT (resource) DO UPDATE SET max_token = max(r.max_token, excluded.max_token), \
                 announced = excluded.announced, announced_lease = excluded.announced_lease, \
                 updated_at = excluded.updated_at \
             WHERE r.max_token < $2 \
                 AND (r.announced < $2 OR (r.announced = $2 AND r.announced_lease IS $3)) \
                 AND (NOT $5 OR r.announced = 0 OR (r.announced_lease IS $3 AND r.max_token <= r.announced))";
        const HIGHEST: &str = "SELECT max(max_token, announced), announced = $2 AND announced_lease IS $3 \
             FROM tower_fence.resources WHERE resource = $1";
        let announced = sqlx::query(names.sql(ANNOUNCE))
            .bind(claim.resource.as_str())
            .bind(claim.token.get())
            .bind(&lease.as_bytes()[..])
            .bind(i16::from(partition_of(&claim.resource)))
            .bind(renews)
            .execute(&mut *conn);
        if announced.await?.rows_affected() == 1 {
            return Ok(Announcement::Announced);
        }
        let highest: Option<(i64, bool)> = sqlx::query_as(names.sql(HIGHEST))
            .bind(claim.resource.as_str())
            .bind(claim.token.get())
            .bind(&lease.as_bytes()[..])
            .fetch_optional(&mut *conn)
            .await?;
        let (highest, was_last) = match highest {
            Some(highest) => highest,
            None => (
                Self::floor(On::new(conn, names), partition_of(&claim.resource)).await?,
                false,
            ),
        };
        Ok(Announcement::Superseded { highest, was_last })
    }

    async fn is_announced(
        On { conn, names }: On<'_, Self>,
        claim: &Claim,
        lease: &LeaseDigest,
    ) -> sqlx::Result<bool> {
        const IS_ANNOUNCED: &str = "SELECT EXISTS (SELECT 1 FROM tower_fence.resources \
             WHERE resource = $1 AND max_token < $2 AND announced = $2 AND announced_lease IS $3)";
        sqlx::query_scalar(names.sql(IS_ANNOUNCED))
            .bind(claim.resource.as_str())
            .bind(claim.token.get())
            .bind(&lease.as_bytes()[..])
            .fetch_one(conn)
            .await
    }

    async fn reset(On { conn, names }: On<'_, Self>, claim: &Claim) -> sqlx::Result<i64> {
        const RESET: &str = "UPDATE tower_fence.resources SET max_token = $2, \
             announced_lease = CASE WHEN announced > $2 THEN NULL ELSE announced_lease END, \
             announced = min(announced, $2) WHERE resource = $1";
        // If a resource has no row and the floor blocks it, insert a row, which takes precedence
        // over the floor.
        const INSERT: &str = "INSERT INTO tower_fence.resources (resource, max_token, updated_at, partition) \
             SELECT $1, $2, CURRENT_TIMESTAMP, $3 FROM tower_fence.floors \
             WHERE partition = $3 AND floor > $2";
        let partition = partition_of(&claim.resource);
        let row = Self::state(On::new(conn, names), &claim.resource).await?;
        // Ignore a grant of the highest possible token. The forged token that this reset removes
        // may have forced that grant, and a reset is the only remedy.
        let announced = row.map(|(_, _, announced, _)| announced);
        let announced = announced.filter(|announced| *announced < Token::MAX.get());
        let last_epoch = Self::last_epoch(On::new(conn, names), partition).await?;
        let begun = last_epoch.map_or(0, |epoch| epoch * Epoch::SIZE);
        let granted = announced.unwrap_or(0).max(begun);
        if granted > claim.token.get() {
            return Ok(granted);
        }
        let reset = sqlx::query(names.sql(RESET))
            .bind(claim.resource.as_str())
            .bind(claim.token.get())
            .execute(&mut *conn);
        if reset.await?.rows_affected() == 0 {
            sqlx::query(names.sql(INSERT))
                .bind(claim.resource.as_str())
                .bind(claim.token.get())
                .bind(i16::from(partition))
                .execute(conn)
                .await?;
        }
        Ok(granted)
    }

    async fn after_failover(On { conn, names }: On<'_, Self>) -> sqlx::Result<bool> {
        // If other partitions have epochs, a partition without an epoch may have lost its epoch.
        const MOVE_UP: &str = "WITH RECURSIVE all_partitions (n) AS \
             (SELECT 0 UNION ALL SELECT n + 1 FROM all_partitions WHERE n < 255) \
             INSERT INTO tower_fence.epochs (partition, epoch) SELECT n, 500 FROM all_partitions \
             WHERE EXISTS (SELECT 1 FROM tower_fence.epochs WHERE epoch > 0) \
             ON CONFLICT (partition) DO UPDATE SET epoch = min(epoch + 500, 999999)";
        const FLOORS: &str = "UPDATE tower_fence.floors AS l \
             SET floor = max(floor, epoch * 1000000000 + 999999999) \
             FROM tower_fence.epochs AS e WHERE e.partition = l.partition";
        // If the tokens of a row are above the end of the new epoch, or slightly below it, the
        // resource has received a forged token or a token of another issuer. Later grants of the
        // resource were above that token. The lost commits contain fewer than 500,000 such grants,
        // so the row is raised by that number.
        const ROWS: &str = "UPDATE tower_fence.resources AS r SET max_token = \
             max(epoch * 1000000000 + 999999999, min(max(max_token, announced) + 500000, 999999999999999)) \
             FROM tower_fence.epochs AS e WHERE e.partition = r.partition";
        let moved = sqlx::query(names.sql(MOVE_UP)).execute(&mut *conn).await?;
        let has_epochs = moved.rows_affected() > 0;
        if has_epochs {
            for raise in [FLOORS, ROWS] {
                sqlx::query(names.sql(raise)).execute(&mut *conn).await?;
            }
        }
        Ok(has_epochs)
    }

    async fn remove_idle(
        On { conn, names }: On<'_, Self>,
        partition: u8,
        idle: Idle,
    ) -> sqlx::Result<u64> {
        // SQLite allows one writer at a time, so no row is inserted between the two statements.
        const REMOVE: &str = "DELETE FROM tower_fence.resources WHERE resource IN (\
                 SELECT resource FROM tower_fence.resources WHERE partition = $1 \
                     AND unixepoch(updated_at) < unixepoch('subsec') - $2 \
                     AND max(max_token, announced) < $4 \
                 LIMIT $3) \
             RETURNING max(max_token, announced)";
        const RAISE: &str = "UPDATE tower_fence.floors SET floor = $2 \
             WHERE partition = $1 AND floor < $2";
        let below = match idle.granted {
            Some(granted) => granted.get() + 1,
            None => {
                let last = Self::last_epoch(On::new(conn, names), partition).await?;
                (last.unwrap_or(0) + 1) * Epoch::SIZE
            }
        };
        let below = idle.live.map_or(below, |live| live.get().min(below));
        let removed: Vec<i64> = sqlx::query_scalar(names.sql(REMOVE))
            .bind(i16::from(partition))
            .bind(idle.older_than.as_secs_f64())
            .bind(idle.at_most)
            .bind(below)
            .fetch_all(&mut *conn)
            .await?;
        if let Some(stale) = removed.iter().max() {
            sqlx::query(names.sql(RAISE))
                .bind(i16::from(partition))
                .bind(stale)
                .execute(conn)
                .await?;
        }
        Ok(removed.len() as u64)
    }

    async fn next_epoch(
        On { conn, names }: On<'_, Self>,
        partition: u8,
        at_least: i64,
    ) -> sqlx::Result<i64> {
        const NEXT: &str = "INSERT INTO tower_fence.epochs AS e (partition, epoch) VALUES ($1, $2) \
             ON CONFLICT (partition) DO UPDATE SET epoch = max(e.epoch + 1, excluded.epoch) \
             WHERE e.epoch < 999999 RETURNING epoch";
        let begun = sqlx::query_scalar(names.sql(NEXT))
            .bind(i16::from(partition))
            .bind(at_least)
            .fetch_optional(conn)
            .await?;
        // If no epoch is left, return an epoch above the range, which the caller refuses.
        Ok(begun.unwrap_or(Token::MAX.get() / Epoch::SIZE + 1))
    }

    async fn report_epoch(
        On { conn, names }: On<'_, Self>,
        partition: u8,
        seen: i64,
    ) -> sqlx::Result<i64> {
        const REPORT: &str = "INSERT INTO tower_fence.epochs AS e (partition, epoch) VALUES ($1, $2) \
             ON CONFLICT (partition) DO UPDATE SET epoch = excluded.epoch WHERE e.epoch < excluded.epoch";
        sqlx::query(names.sql(REPORT))
            .bind(i16::from(partition))
            .bind(seen)
            .execute(&mut *conn)
            .await?;
        Self::floor(On::new(conn, names), partition).await
    }

    async fn has_leases(_: On<'_, Self>, _: u8) -> sqlx::Result<bool> {
        Ok(false)
    }

    states!(idle_ms: "CAST((unixepoch('subsec') - unixepoch(updated_at, 'subsec')) * 1000 AS INTEGER)");
}
