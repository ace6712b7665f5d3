//! Reads, thinks and writes back by SQL alone.

use sqlx::{Connection, PgConnection, Row};
use tokio::time::timeout;

use super::{Client, PATIENCE, call::Held};
use crate::{
    history::{Answer, Kind},
    service::{Writing, write},
};

/// What was taken by SQL: a token, and the id of its lease.
type Taken = Option<(i64, String)>;

impl Client {
    pub(super) async fn count_in_sql(
        &mut self,
        connection: &mut Option<PgConnection>,
    ) -> Option<()> {
        let mut conn = match connection.take() {
            Some(conn) => conn,
            None => {
                let connect = PgConnection::connect(&self.servers.database);
                timeout(PATIENCE, connect).await.ok()?.ok()?
            }
        };
        let resource = self.choose();
        let (held, lease) = match self.servers.leases_in_sql {
            true => {
                let invoked = self.now();
                let taken = take(&mut conn, &self.side.names[resource]);
                let (token, id) = match timeout(PATIENCE, taken).await.ok()?.ok()? {
                    Some(taken) => taken,
                    None => {
                        *connection = Some(conn);
                        return None;
                    }
                };
                (
                    self.granted(resource, token, String::new(), invoked),
                    Err(id),
                )
            }
            false => {
                let (lease, held) = self.acquire(resource, 1).await?;
                (held, Ok(lease))
            }
        };
        let names = [self.side.names[resource].clone()];
        let read = self.side.tables.states(&mut conn, &names);
        let read = timeout(PATIENCE, read).await.ok()?.ok()?;
        self.think(20, 0.02).await;
        let writing = self.writing(&[&held], &[1], Some(&read));
        let invoked = self.now();
        let answer = timeout(PATIENCE, self.write_in_sql(&mut conn, &held, &writing)).await;
        let answer = answer.unwrap_or(Answer::Unknown);
        let kind = Kind::Write {
            entry: writing.entry,
            amount: 1,
        };
        self.record(&[&held], &[kind], invoked, answer);
        match lease {
            Ok(lease) => self.release(&lease).await,
            Err(id) => {
                let release = sqlx::query("SELECT fence_release($1, $2)")
                    .bind(&names[0])
                    .bind(id);
                let _ = timeout(PATIENCE, release.execute(&mut conn)).await.ok()?;
            }
        }
        if answer == Answer::Done {
            *connection = Some(conn);
        }
        Some(())
    }

    async fn write_in_sql(
        &self,
        conn: &mut PgConnection,
        held: &Held,
        writing: &Writing,
    ) -> Answer {
        let names = [self.side.names[held.resource].clone()];
        let written = async {
            let mut tx = conn.begin().await?;
            if self.side.is_fenced {
                let admit = sqlx::query("SELECT fence_admit($1, $2)")
                    .bind(&names[0])
                    .bind(held.token);
                admit.execute(&mut *tx).await?;
            }
            write(&mut tx, self.side.tables, &names, writing).await?;
            tx.commit().await
        };
        match written.await {
            Ok(()) => Answer::Done,
            Err(error) if is_stale(&error) => Answer::Refused,
            Err(_) => Answer::Unknown,
        }
    }
}

async fn take(conn: &mut PgConnection, resource: &str) -> sqlx::Result<Taken> {
    let take = sqlx::query("SELECT token, lease_id FROM fence_acquire($1, '2 s')").bind(resource);
    match take.fetch_one(conn).await {
        Ok(row) => Ok(Some((row.get(0), row.get(1)))),
        Err(error) if code(&error).as_deref() == Some("TF409") => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_stale(error: &sqlx::Error) -> bool {
    code(error).as_deref() == Some("TF412")
}

fn code(error: &sqlx::Error) -> Option<String> {
    Some(error.as_database_error()?.code()?.into_owned())
}
