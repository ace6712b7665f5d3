//! Clients that read, pause and write back only with SQL, either once or repeatedly under one
//! lease.

use sqlx::{AssertSqlSafe, Connection, PgConnection, query, query_as, raw_sql};
use tokio::time::timeout;
use tower_fence::{Token, TokenUse, header::FencingToken, lease::Lease};

use super::{Client, PATIENCE, record::Held, workloads::Stream};
use crate::{
    history::{Answer, State},
    service::{Writing, write},
};

/// The id of a lease that was acquired in SQL, or a lease that was acquired by HTTP.
type TakenLease = Result<String, Lease>;

impl Client {
    pub(super) async fn count_in_sql(&mut self) -> Option<()> {
        let (mut conn, held, lease, state) = self.read_in_sql().await?;
        self.think(20, 0.02).await;
        let writing = self.writing(&[&held], &[1], Some(&[state]));
        let request = self.write_in_sql(&mut conn, &held, &writing);
        let side = &self.side;
        let answer = side
            .write(&[&held], &writing, TokenUse::SingleUse, request)
            .await;
        self.release_in_sql(&mut conn, held.resource, lease).await?;
        if answer == Answer::Done {
            self.connection = Some(conn);
        }
        Some(())
    }

    /// Writes repeatedly, like [`stream`](Self::stream), but sends each write in one message:
    /// BEGIN, the admission, the write, COMMIT.
    pub(super) async fn stream_in_sql(&mut self) -> Option<()> {
        let (mut conn, held, lease, mut state) = self.read_in_sql().await?;
        let mut stream = Stream::new(self);
        let mut answer = Answer::Done;
        while answer == Answer::Done && stream.goes_on(self).await {
            let writing = self.writing(&[&held], &[1], Some(&[state]));
            let message = self.message(&held, &writing);
            let request = answer_to(raw_sql(AssertSqlSafe(message)).execute(&mut conn));
            let side = &self.side;
            answer = side
                .write(&[&held], &writing, TokenUse::Reusable, request)
                .await;
            state = state.with(writing.entry, 1);
        }
        if answer != Answer::Done {
            // The connection may be in a failed transaction.
            conn = self.connect().await?;
        }
        self.release_in_sql(&mut conn, held.resource, lease).await?;
        self.connection = Some(conn);
        Some(())
    }

    /// Connects, acquires a lease, and reads the state of its resource.
    async fn read_in_sql(&mut self) -> Option<(PgConnection, Held, TakenLease, State)> {
        let mut conn = match self.connection.take() {
            Some(conn) => conn,
            None => self.connect().await?,
        };
        let resource = self.choose();
        let (lease, held) = match self.acquire_in_sql(&mut conn, resource).await {
            Ok(granted) => granted,
            Err(answer) => {
                self.connection = (answer == Answer::Undone).then_some(conn);
                return None;
            }
        };
        let name = std::slice::from_ref(&self.side.names[resource]);
        let read = self.side.tables.states(&mut conn, name);
        let state = *timeout(PATIENCE, read).await.ok()?.ok()?.first()?;
        Some((conn, held, lease, state))
    }

    async fn connect(&self) -> Option<PgConnection> {
        let connect = PgConnection::connect(&self.servers.settings.database);
        timeout(PATIENCE, connect).await.ok()?.ok()
    }

    /// Acquires a lease, with SQL if the leases are in Postgres.
    async fn acquire_in_sql(
        &mut self,
        conn: &mut PgConnection,
        resource: usize,
    ) -> Result<(TakenLease, Held), Answer> {
        if self.servers.settings.store != "postgres" {
            let (lease, held) = self.acquire(resource, 1).await?;
            return Ok((Err(lease), held));
        }
        let request = async {
            let take = query_as("SELECT lease_id, token FROM tower_fence.acquire($1, '2 s')")
                .bind(&self.side.names[resource]);
            match timeout(PATIENCE, take.fetch_one(conn)).await {
                Ok(Ok((id, token))) => {
                    let token = Token::new(token).expect("the function returns a valid token");
                    Ok((Ok(id), FencingToken::new(token)))
                }
                Ok(Err(error)) if has_code(&error, "TF409") => Err(Answer::Undone),
                _ => Err(Answer::Unknown),
            }
        };
        self.side.grant(resource, request).await
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
                let release = query("SELECT tower_fence.release($1, $2)")
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
        let (name, token) = (&self.side.names[held.resource], writing.tokens[0]);
        let admit = match self.side.is_fenced {
            true => format!("SELECT tower_fence.admit('{name}', {token}, reusable => true);"),
            false => String::new(),
        };
        let back = writing.back.as_ref().expect("the state was read")[0];
        let tables = self.side.tables;
        let write = tables.write_in_text(name, writing.entry, token, back);
        format!("BEGIN; {admit} {write}; COMMIT")
    }

    async fn write_in_sql(
        &self,
        conn: &mut PgConnection,
        held: &Held,
        writing: &Writing,
    ) -> Answer {
        let names = std::slice::from_ref(&self.side.names[held.resource]);
        let written = async {
            let mut tx = conn.begin().await?;
            if self.side.is_fenced {
                let admit = query("SELECT tower_fence.admit($1, $2)").bind(&names[0]);
                let admit = admit.bind(writing.tokens[0]);
                admit.execute(&mut *tx).await?;
            }
            write(&mut tx, self.side.tables, names, writing).await?;
            tx.commit().await
        };
        answer_to(written).await
    }
}

async fn answer_to<T>(written: impl Future<Output = sqlx::Result<T>>) -> Answer {
    match timeout(PATIENCE, written).await {
        Ok(Ok(_)) => Answer::Done,
        Ok(Err(error)) if has_code(&error, "TF412") => Answer::Refused,
        _ => Answer::Unknown,
    }
}

fn has_code(error: &sqlx::Error, expected: &str) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.as_deref() == Some(expected)
}
