//! The statements of the fence, which are the same on every database but for a few words.

/// The statements that are the same on every database. The macro writes them once per database,
/// since sqlx's types differ.
macro_rules! statements {
    (
        lock: $lock:literal,
        share: $share:literal,
        admitted_by: [
            $set_admitted_by:literal, $admitted_by:literal, $transaction:literal,
            $set_excluded_admitted_by:literal $(,)?
        ],
        and_durably: $and_durably:expr,
        history: [
            $history:literal, $and_ours:literal, $and_same:literal $(,)?
        ]
    ) => {
        async fn admit(
            conn: &mut Self::Connection,
            tables: &Tables,
            admit: Admit<'_>,
        ) -> sqlx::Result<Admission> {
            // The row stays locked until the transaction ends. At READ COMMITTED the WHERE is
            // evaluated on the newest version of the row, after the wait for its lock.
            const ADMIT: &str = concat!(
                "UPDATE {schema}.fence_resources SET max_token = $3, updated_at = CURRENT_TIMESTAMP",
                $set_admitted_by,
                " WHERE resource = $1 AND max_token < $2",
                $and_ours,
                " AND ",
                $lock
            );
            // A resource that has no row; or for which another transaction has just made one. While the
            // floor is locked, no row of its partition is removed.
            const ADMIT_FIRST: &str = concat!(
                "INSERT INTO {schema}.fence_resources AS f (resource, max_token, updated_at, partition",
                $admitted_by,
                $history,
                ") SELECT $1, $3, CURRENT_TIMESTAMP, $5",
                $transaction,
                $history,
                " FROM (SELECT floor",
                $history,
                " FROM {schema}.fence_floors WHERE partition = $5",
                $and_ours,
                $share,
                ") AS s WHERE $2 > s.floor AND ",
                $lock,
                " ON CONFLICT (resource) DO UPDATE \
                 SET max_token = excluded.max_token, updated_at = excluded.updated_at",
                $set_excluded_admitted_by,
                " WHERE f.max_token < $2",
                $and_same
            );
            let admit_known = sqlx::query(tables.sql(ADMIT))
                .bind(admit.resource.as_str())
                .bind(admit.token.get())
                .bind(admit.dead)
                .bind(admit.lock.0)
                .execute(&mut *conn);
            if admit_known.await?.rows_affected() == 1 {
                return Ok(Admission::Admitted);
            }
            let admit_first = sqlx::query(tables.sql(ADMIT_FIRST))
                .bind(admit.resource.as_str())
                .bind(admit.token.get())
                .bind(admit.dead)
                .bind(admit.lock.0)
                .bind(i16::from(partition_of(admit.resource)))
                .execute(&mut *conn);
            if admit_first.await?.rows_affected() == 1 {
                return Ok(Admission::Admitted);
            }
            let dead = Self::dead(conn, tables, admit.resource).await?;
            if let Some(dead) = dead.filter(|dead| dead.max_token >= admit.token.get()) {
                return Ok(Admission::Stale(dead));
            }
            // It was refused, and is not dead: another history has refused it, out of which somebody else may have
            // brought the resource since.
            Ok(Admission::Behind)
        }

        async fn admit_early(
            conn: &mut Self::Connection,
            tables: &Tables,
            admit: Admit<'_>,
        ) -> sqlx::Result<bool> {
            const ADMIT_EARLY: &str = concat!(
                "UPDATE {schema}.fence_resources SET max_token = $3, updated_at = CURRENT_TIMESTAMP",
                $set_admitted_by,
                " WHERE resource = $1 AND max_token < $2 AND updated_at <= CURRENT_TIMESTAMP",
                $and_ours,
                " AND ",
                $lock
            );
            let admitted = sqlx::query(tables.sql(ADMIT_EARLY))
                .bind(admit.resource.as_str())
                .bind(admit.token.get())
                .bind(admit.dead)
                .bind(admit.lock.0)
                .execute(conn);
            Ok(admitted.await?.rows_affected() == 1)
        }

        async fn raise(
            conn: &mut Self::Connection,
            tables: &Tables,
            resource: &Resource,
            token: Token,
        ) -> sqlx::Result<Option<Dead>> {
            // Where the transaction began before its request, the row may be younger than it.
            const RAISE: &str = concat!(
                "UPDATE {schema}.fence_resources SET max_token = $2, updated_at = CASE \
                 WHEN updated_at > CURRENT_TIMESTAMP THEN updated_at ELSE CURRENT_TIMESTAMP END \
                 WHERE resource = $1 AND max_token < $2",
                $and_ours,
                $and_durably
            );
            const RAISE_FIRST: &str = concat!(
                "INSERT INTO {schema}.fence_resources AS f (resource, max_token, updated_at, partition",
                $history,
                ") SELECT $1, $2, CURRENT_TIMESTAMP, $3",
                $history,
                " FROM (SELECT floor",
                $history,
                " FROM {schema}.fence_floors WHERE partition = $3",
                $and_ours,
                $share,
                ") AS s WHERE $2 >= s.floor",
                $and_durably,
                " ON CONFLICT (resource) DO UPDATE SET max_token = excluded.max_token \
                 WHERE f.max_token < $2",
                $and_same
            );
            let older = TokenUse::Reusable.dead(token);
            let dead_already = async |conn: &mut _, row: RowVersion| {
                let stays = !row.may_be_lost || Self::outlast_crash(conn, tables, resource).await?;
                Ok(stays.then_some(Dead::by_row(row.max_token)))
            };
            let raise_known = sqlx::query(tables.sql(RAISE))
                .bind(resource.as_str())
                .bind(older)
                .execute(&mut *conn);
            if raise_known.await?.rows_affected() == 1 {
                return Ok(Some(Dead::by_row(older)));
            }
            match Self::row_version(conn, tables, resource).await? {
                Some(row) if row.is_behind => return Ok(None),
                Some(row) if row.max_token >= older => return dead_already(conn, row).await,
                // Somebody may have inserted a lower one in between.
                _ => {}
            }
            let raise_first = sqlx::query(tables.sql(RAISE_FIRST))
                .bind(resource.as_str())
                .bind(older)
                .bind(i16::from(partition_of(resource)))
                .execute(&mut *conn);
            if raise_first.await?.rows_affected() == 1 {
                return Ok(Some(Dead::by_row(older)));
            }
            match Self::row_version(conn, tables, resource).await? {
                // Or a trigger of the application's takes no change.
                Some(row) if row.is_behind || row.max_token < older => Ok(None),
                Some(row) => dead_already(conn, row).await,
                None => {
                    let floor = Self::floor(conn, tables, partition_of(resource)).await?;
                    Ok((floor >= token.get()).then_some(Dead::by_floor(floor)))
                }
            }
        }

        async fn max_token(
            conn: &mut Self::Connection,
            tables: &Tables,
            resource: &Resource,
        ) -> sqlx::Result<Option<i64>> {
            const MAX_TOKEN: &str =
                "SELECT max_token FROM {schema}.fence_resources WHERE resource = $1";
            sqlx::query_scalar(tables.sql(MAX_TOKEN))
                .bind(resource.as_str())
                .fetch_optional(conn)
                .await
        }

        async fn floor(
            conn: &mut Self::Connection,
            tables: &Tables,
            partition: u8,
        ) -> sqlx::Result<i64> {
            const FLOOR: &str = "SELECT floor FROM {schema}.fence_floors WHERE partition = $1";
            let floor = sqlx::query_scalar(tables.sql(FLOOR))
                .bind(i16::from(partition))
                .fetch_optional(conn);
            // The migrations have made a row for each partition.
            floor.await?.ok_or_else(|| {
                let hidden = format!(
                    "fence_floors shows no row for partition {partition}: row-level security hides it, or the tables \
                     of the fence were emptied, or restored in part"
                );
                sqlx::Error::Configuration(hidden.into())
            })
        }

        async fn announced(
            conn: &mut Self::Connection,
            tables: &Tables,
            resource: &Resource,
        ) -> sqlx::Result<Option<i64>> {
            const ANNOUNCED: &str =
                "SELECT announced FROM {schema}.fence_resources WHERE resource = $1";
            sqlx::query_scalar(tables.sql(ANNOUNCED))
                .bind(resource.as_str())
                .fetch_optional(conn)
                .await
        }

        async fn announce(
            conn: &mut Self::Connection,
            tables: &Tables,
            resource: &Resource,
            token: Token,
            lease: &LeaseDigest,
        ) -> sqlx::Result<Announcement> {
            // Where the transaction began before its request, the row may be younger than it.
            const ANNOUNCE: &str = concat!(
                "UPDATE {schema}.fence_resources SET \
                     max_token = CASE WHEN max_token < $2 - 1 THEN $2 - 1 ELSE max_token END, \
                     announced = $2, announced_lease = $3, \
                     updated_at = CASE WHEN updated_at > CURRENT_TIMESTAMP THEN updated_at \
                         ELSE CURRENT_TIMESTAMP END \
                 WHERE resource = $1 AND max_token < $2 \
                     AND (announced < $2 OR (announced = $2 AND announced_lease = $3))",
                $and_durably,
                $and_ours
            );
            const ANNOUNCE_FIRST: &str = concat!(
                "INSERT INTO {schema}.fence_resources \
                     (resource, max_token, announced, announced_lease, updated_at, partition",
                $history,
                ") SELECT $1, $2 - 1, $2, $3, CURRENT_TIMESTAMP, $4",
                $history,
                " FROM (SELECT floor",
                $history,
                " FROM {schema}.fence_floors WHERE partition = $4",
                $and_ours,
                $share,
                ") AS s WHERE $2 > s.floor",
                $and_durably,
                " ON CONFLICT (resource) DO NOTHING"
            );
            const HIGHEST: &str = "SELECT CASE WHEN max_token < announced THEN announced \
                 ELSE max_token END, \
                 announced = $2 AND announced_lease IS NOT NULL AND announced_lease = $3 \
                 FROM {schema}.fence_resources WHERE resource = $1";
            let announce_known = sqlx::query(tables.sql(ANNOUNCE))
                .bind(resource.as_str())
                .bind(token.get())
                .bind(&lease.as_bytes()[..])
                .execute(&mut *conn);
            if announce_known.await?.rows_affected() == 1 {
                return Ok(Announcement::Announced);
            }
            let highest: Option<(i64, bool)> = sqlx::query_as(tables.sql(HIGHEST))
                .bind(resource.as_str())
                .bind(token.get())
                .bind(&lease.as_bytes()[..])
                .fetch_optional(&mut *conn)
                .await?;
            let (highest, was_last) = match highest {
                Some(highest) => highest,
                None => {
                    let announce_first = sqlx::query(tables.sql(ANNOUNCE_FIRST))
                        .bind(resource.as_str())
                        .bind(token.get())
                        .bind(&lease.as_bytes()[..])
                        .bind(i16::from(partition_of(resource)))
                        .execute(&mut *conn);
                    if announce_first.await?.rows_affected() == 1 {
                        return Ok(Announcement::Announced);
                    }
                    let floor = Self::floor(conn, tables, partition_of(resource)).await?;
                    (floor, false)
                }
            };
            // As with an admission. Or another transaction has made the row in between.
            Ok(match highest >= token.get() {
                true => Announcement::Outranked { highest, was_last },
                false => Announcement::Behind,
            })
        }

        async fn handed_out_epoch(
            conn: &mut Self::Connection,
            tables: &Tables,
            partition: u8,
        ) -> sqlx::Result<Option<i64>> {
            const LAST: &str = "SELECT epoch FROM {schema}.fence_epochs WHERE partition = $1";
            sqlx::query_scalar(tables.sql(LAST))
                .bind(i16::from(partition))
                .fetch_optional(conn)
                .await
        }

        async fn reset(
            conn: &mut Self::Connection,
            tables: &Tables,
            resource: &Resource,
            partition: u8,
            token: Token,
        ) -> sqlx::Result<i64> {
            // An update that changes nothing locks the row.
            const LOCK: &str = "UPDATE {schema}.fence_resources SET max_token = max_token \
                 WHERE resource = $1 RETURNING announced";
            // What the floor refuses gets a row again, which is all that counts then.
            const MAKE: &str = "INSERT INTO {schema}.fence_resources AS f \
                     (resource, max_token, updated_at, partition) \
                 SELECT $1, $2, CURRENT_TIMESTAMP, $3 FROM {schema}.fence_floors \
                 WHERE partition = $3 AND floor > $2 \
                 ON CONFLICT (resource) DO UPDATE SET max_token = f.max_token RETURNING announced";
            const RESET: &str = "UPDATE {schema}.fence_resources SET max_token = $2, \
                 announced_lease = CASE WHEN announced > $2 THEN NULL ELSE announced_lease END, \
                 announced = CASE WHEN announced > $2 THEN $2 ELSE announced END \
                 WHERE resource = $1";
            let mut announced: Option<i64> = sqlx::query_scalar(tables.sql(LOCK))
                .bind(resource.as_str())
                .fetch_optional(&mut *conn)
                .await?;
            if announced.is_none() {
                announced = sqlx::query_scalar(tables.sql(MAKE))
                    .bind(resource.as_str())
                    .bind(token.get())
                    .bind(i16::from(partition))
                    .fetch_optional(&mut *conn)
                    .await?;
            }
            let last_epoch = Self::handed_out_epoch(conn, tables, partition).await?;
            // At the end of the range a grant has outranked what is to be taken back, and there is no
            // other cure.
            let announced = announced.filter(|announced| *announced < Token::MAX.get());
            let begun = last_epoch.map_or(0, |epoch| epoch * Epoch::SIZE);
            let granted = announced.unwrap_or(0).max(begun);
            if granted <= token.get() {
                sqlx::query(tables.sql(RESET))
                    .bind(resource.as_str())
                    .bind(token.get())
                    .execute(conn)
                    .await?;
            }
            Ok(granted)
        }

        async fn source_id(
            conn: &mut Self::Connection,
            tables: &Tables,
        ) -> sqlx::Result<String> {
            sqlx::query_scalar(tables.sql("SELECT id FROM {schema}.fence_epoch_source"))
                .fetch_one(conn)
                .await
        }

        async fn bring_back(
            conn: &mut Self::Connection,
            tables: &Tables,
            partition: u8,
            seen: i64,
        ) -> sqlx::Result<()> {
            const BRING_BACK: &str = "INSERT INTO {schema}.fence_epochs AS e (partition, epoch) \
                 VALUES ($1, $2) ON CONFLICT (partition) DO UPDATE SET epoch = excluded.epoch \
                 WHERE e.epoch < excluded.epoch";
            sqlx::query(tables.sql(BRING_BACK))
                .bind(i16::from(partition))
                .bind(seen)
                .execute(conn)
                .await?;
            Ok(())
        }

        async fn next_epoch(
            conn: &mut Self::Connection,
            tables: &Tables,
            partition: u8,
            at_least: i64,
        ) -> sqlx::Result<i64> {
            const NEXT: &str = "INSERT INTO {schema}.fence_epochs AS e (partition, epoch) VALUES ($1, $2) \
                 ON CONFLICT (partition) DO UPDATE SET epoch = \
                 CASE WHEN e.epoch < excluded.epoch THEN excluded.epoch ELSE e.epoch + 1 END \
                 RETURNING epoch";
            sqlx::query_scalar(tables.sql(NEXT))
                .bind(i16::from(partition))
                .bind(at_least)
                .fetch_one(conn)
                .await
        }
    };
}

pub(super) use statements;
