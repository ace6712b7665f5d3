//! The statements of the fence, which are the same on every database but for a few words.

/// The statements that are the same on every database. The macro writes them once per database,
/// since sqlx's types differ.
macro_rules! statements {
    (lock: $lock:literal) => {
        async fn admit(
            conn: &mut Self::Connection,
            tables: &Tables,
            admit: Admit<'_>,
        ) -> sqlx::Result<Admission> {
            // The row stays locked until the transaction ends. At READ COMMITTED the WHERE is
            // evaluated on the newest version of the row, after the wait for its lock.
            const ADMIT: &str = concat!(
                "UPDATE {schema}.fence_resources SET max_token = $3, updated_at = CURRENT_TIMESTAMP \
                 WHERE resource = $1 AND max_token < $2 AND ",
                $lock
            );
            // A resource that was never seen before; or that another transaction has just written to for
            // the first time. For one that is there, this costs half as much again.
            const ADMIT_FIRST: &str = concat!(
                "INSERT INTO {schema}.fence_resources AS f (resource, max_token, updated_at) \
                 SELECT $1, $3, CURRENT_TIMESTAMP WHERE ",
                $lock,
                " ON CONFLICT (resource) DO UPDATE \
                 SET max_token = excluded.max_token, updated_at = excluded.updated_at \
                 WHERE f.max_token < $2"
            );
            for statement in [ADMIT, ADMIT_FIRST] {
                let admitted = sqlx::query(tables.sql(statement))
                    .bind(admit.resource.as_str())
                    .bind(admit.token.get())
                    .bind(admit.floor)
                    .bind(admit.lock.0)
                    .execute(&mut *conn);
                if admitted.await?.rows_affected() == 1 {
                    return Ok(Admission::Admitted);
                }
            }
            let max_token = Self::max_token(conn, tables, admit.resource).await?;
            Ok(Admission::Stale {
                max_token: max_token.unwrap_or(admit.token.get()),
            })
        }

        async fn admit_early(
            conn: &mut Self::Connection,
            tables: &Tables,
            admit: Admit<'_>,
        ) -> sqlx::Result<bool> {
            const ADMIT_EARLY: &str = concat!(
                "UPDATE {schema}.fence_resources SET max_token = $3, updated_at = CURRENT_TIMESTAMP \
                 WHERE resource = $1 AND max_token < $2 AND updated_at <= CURRENT_TIMESTAMP AND ",
                $lock
            );
            let admitted = sqlx::query(tables.sql(ADMIT_EARLY))
                .bind(admit.resource.as_str())
                .bind(admit.token.get())
                .bind(admit.floor)
                .bind(admit.lock.0)
                .execute(conn);
            Ok(admitted.await?.rows_affected() == 1)
        }

        async fn raise(
            conn: &mut Self::Connection,
            tables: &Tables,
            resource: &Resource,
            floor: i64,
        ) -> sqlx::Result<i64> {
            // Where the transaction began before its request, the row may be younger than it.
            const RAISE: &str = "UPDATE {schema}.fence_resources SET max_token = $2, updated_at = CASE \
                 WHEN updated_at > CURRENT_TIMESTAMP THEN updated_at ELSE CURRENT_TIMESTAMP END \
                 WHERE resource = $1 AND max_token < $2 RETURNING max_token";
            const RAISE_FIRST: &str = "INSERT INTO {schema}.fence_resources AS f \
                 (resource, max_token, updated_at) VALUES ($1, $2, CURRENT_TIMESTAMP) \
                 ON CONFLICT (resource) DO UPDATE SET max_token = excluded.max_token \
                 WHERE f.max_token < $2 \
                 RETURNING max_token";
            for statement in [RAISE, RAISE_FIRST] {
                let raised: Option<i64> = sqlx::query_scalar(tables.sql(statement))
                    .bind(resource.as_str())
                    .bind(floor)
                    .fetch_optional(&mut *conn)
                    .await?;
                if let Some(max_token) = raised {
                    return Ok(max_token);
                }
                // Somebody may have inserted a lower one in between.
                match Self::max_token(conn, tables, resource).await? {
                    Some(max_token) if max_token >= floor => return Ok(max_token),
                    _ => {}
                }
            }
            Ok(floor)
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
            const ANNOUNCE: &str = "INSERT INTO {schema}.fence_resources AS f \
                 (resource, max_token, announced, announced_lease, updated_at) \
                 VALUES ($1, $2 - 1, $2, $3, CURRENT_TIMESTAMP) \
                 ON CONFLICT (resource) DO UPDATE SET \
                     max_token = CASE WHEN f.max_token < $2 - 1 THEN $2 - 1 ELSE f.max_token END, \
                     announced = $2, announced_lease = $3, \
                     updated_at = CASE WHEN f.updated_at > CURRENT_TIMESTAMP THEN f.updated_at \
                         ELSE CURRENT_TIMESTAMP END \
                 WHERE f.max_token < $2 \
                     AND (f.announced < $2 OR (f.announced = $2 AND f.announced_lease = $3))";
            const HIGHEST: &str = "SELECT CASE WHEN max_token < announced THEN announced \
                 ELSE max_token END, \
                 announced = $2 AND announced_lease IS NOT NULL AND announced_lease = $3 \
                 FROM {schema}.fence_resources WHERE resource = $1";
            let announced = sqlx::query(tables.sql(ANNOUNCE))
                .bind(resource.as_str())
                .bind(token.get())
                .bind(&lease.as_bytes()[..])
                .execute(&mut *conn);
            if announced.await?.rows_affected() == 1 {
                return Ok(Announcement::Announced);
            }
            let (highest, was_last) = sqlx::query_as(tables.sql(HIGHEST))
                .bind(resource.as_str())
                .bind(token.get())
                .bind(&lease.as_bytes()[..])
                .fetch_one(conn)
                .await?;
            Ok(Announcement::Outranked { highest, was_last })
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
            const RESET: &str = "UPDATE {schema}.fence_resources SET max_token = $2, \
                 announced_lease = CASE WHEN announced > $2 THEN NULL ELSE announced_lease END, \
                 announced = CASE WHEN announced > $2 THEN $2 ELSE announced END \
                 WHERE resource = $1";
            let announced: Option<i64> = sqlx::query_scalar(tables.sql(LOCK))
                .bind(resource.as_str())
                .fetch_optional(&mut *conn)
                .await?;
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
