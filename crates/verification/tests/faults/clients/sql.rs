//! Clients that read, pause and write back only with SQL, either once or repeatedly under one
//! lease.

use sqlx::{AssertSqlSafe, Connection, PgConnection, Row, raw_sql};
use tokio::time::timeout;
use tower_fence::{TokenUse, lease::Lease};

use super::{Client, PATIENCE, call::Held, stream::Stream};
use crate::{
    history::{Answer, State, now},
    service::{Writing, write},
};

/// The id of a lease that was acquired in SQL, or a lease that was acquired by HTTP.
type TakenLease = Result<String, Lease>;

impl Client {
    pub(super) async fn count_in_sql(
        &mut self,
        connection: &mut Option<PgConnection>,
    ) -> Option<()> {
        let (mut conn, held, lease, state) = self.read_in_sql(connection).await?;
        self.think(20, 0.02).await;
        let writing = self.writing(&[&held], &[1], Some(&[state]));
        let asked = self.asks(&[&held], &writing, TokenUse::SingleUse);
        let answer = timeout(PATIENCE, self.write_in_sql(&mut conn, &held, &writing)).await;
        let answer = answer.unwrap_or(Answer::Unknown);
        self.answered(asked, answer);
        self.release_in_sql(&mut conn, held.resource, lease).await?;
        if answer == Answer::Done {
            *connection = Some(conn);
        }
        Some(())
    }

    /// Writes repeatedly, like [`stream`](super::stream), but sends each write in one message:
    /// BEGIN, the admission, the write, COMMIT.
    pub(super) async fn stream_in_sql(
        &mut self,
        connection: &mut Option<PgConnection>,
    ) -> Option<()> {
        let (mut conn, held, lease, mut state) = self.read_in_sql(connection).await?;
        let mut stream = Stream::new(self);
        let mut answer = Answer::Done;
        while answer == Answer::Done && stream.goes_on(self).await {
            let writing = self.writing(&[&held], &[1], Some(&[state]));
            let message = self.message(&held, &writing);
            let asked = self.asks(&[&held], &writing, TokenUse::Reusable);
            let written = raw_sql(AssertSqlSafe(message)).execute(&mut conn);
            answer = match timeout(PATIENCE, written).await {
                Ok(Ok(_)) => Answer::Done,
                Ok(Err(error)) if is_stale(&error) => Answer::Refused,
                _ => Answer::Unknown,
            };
            self.answered(asked, answer);
            state = state.with(writing.entry, 1);
        }
        if answer != Answer::Done {
            // The connection may be in a failed transaction.
            conn = self.connection(&mut None).await?;
        }
        self.release_in_sql(&mut conn, held.resource, lease).await?;
        *connection = Some(conn);
        Some(())
    }

    /// Connects, acquires a lease, and reads the state of its resource.
    async fn read_in_sql(
        &mut self,
        connection: &mut Option<PgConnection>,
    ) -> Option<(PgConnection, Held, TakenLease, State)> {
        let mut conn = self.connection(connection).await?;
        let resource = self.choose();
        let Some((held, lease)) = self.acquire_in_sql(&mut conn, resource).await? else {
            *connection = Some(conn);
            return None;
        };
        let names = [self.side.names[resource].clone()];
        let read = self.side.tables.states(&mut conn, &names);
        let state = *timeout(PATIENCE, read).await.ok()?.ok()?.first()?;
        Some((conn, held, lease, state))
    }

    async fn connection(&self, kept: &mut Option<PgConnection>) -> Option<PgConnection> {
        if let Some(conn) = kept.take() {
            return Some(conn);
        }
        let connect = PgConnection::connect(&self.servers.database);
        timeout(PATIENCE, connect).await.ok()?.ok()
    }

    /// Acquires a lease, with SQL if the leases are in Postgres. The outer `Option` is `None` if
    /// the connection is no longer usable.
    async fn acquire_in_sql(
        &mut self,
        conn: &mut PgConnection,
        resource: usize,
    ) -> Option<Option<(Held, TakenLease)>> {
        if !self.servers.leases_in_sql {
            let taken = self.acquire(resource, 1).await;
            return Some(taken.map(|(lease, held)| (held, Err(lease))));
        }
        let invoked = now();
        self.asks_for_lease(resource, invoked);
        let taken = take(conn, &self.side.names[resource]);
        let Ok(Ok(taken)) = timeout(PATIENCE, taken).await else {
            self.not_granted(resource, invoked, Answer::Unknown);
            return None;
        };
        let Some((token, id)) = taken else {
            self.not_granted(resource, invoked, Answer::Undone);
            return Some(None);
        };
        let held = self.granted(resource, token, String::new(), invoked);
        Some(Some((held, Ok(id))))
    }

    async fn release_in_sql(
        &mut self,
        conn: &mut PgConnection,
        resource: usize,
        lease: TakenLease,
    ) -> Option<()> {
        match lease {
            Err(lease) => self.release(&lease).await,
            Ok(id) => {
                let release = sqlx::query("SELECT tower_fence.release($1, $2)")
                    .bind(&self.side.names[resource])
                    .bind(id);
                timeout(PATIENCE, release.execute(conn)).await.ok()?.ok()?;
            }
        }
        Some(())
    }

    /// Returns the SQL text of a whole write. All names and numbers in the text come from the run,
    /// so they need no quoting.
    fn message(&self, held: &Held, writing: &Writing) -> String {
        let (name, token) = (&self.side.names[held.resource], held.token);
        let admit = match self.side.is_fenced {
            true => format!("SELECT tower_fence.admit('{name}', {token}, reusable => true);"),
            false => String::new(),
        };
        let back = writing.back.as_ref().expect("the state was read")[0];
        let write = self
            .side
            .tables
            .write_back_in_text(name, back, writing.entry, token);
        format!("BEGIN; {admit} {write}; COMMIT")
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
                let admit = sqlx::query("SELECT tower_fence.admit($1, $2)")
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

async fn take(conn: &mut PgConnection, resource: &str) -> sqlx::Result<Option<(i64, String)>> {
    let take =
        sqlx::query("SELECT token, lease_id FROM tower_fence.acquire($1, '2 s')").bind(resource);
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
