//! Where the fence's tables are, and what is in them.

use std::sync::Arc;

use sqlx::migrate::MigrateError;

use crate::{
    fence::{
        Fence,
        error::AdmitError,
        fault::Failure,
        sql::{AdvisoryLock, Capabilities, FenceDatabase, Found, Tables, quoted},
        tx::Transaction,
    },
    token::Resource,
};

impl<DB: FenceDatabase> Fence<DB> {
    /// Brings the fence's own tables up to date. Safe to call at each start: where they are current,
    /// it only reads, and needs no right to create anything. On Postgres each call also revokes what `PUBLIC` may do
    /// with the fence's functions and tables, if the role owns them: a dump without rights opens them to everybody.
    /// It waits at most 10 s for a lock.
    ///
    /// They are those of the [`schema`](Self::schema) that was named; otherwise the first ones that the
    /// search path has; otherwise they are made in its first schema.
    ///
    /// # Errors
    ///
    /// sqlx's error, when the database cannot be reached or refuses, or when the fence is unfit for use afterwards: see
    /// [`check`](Self::check).
    pub async fn migrate(&self) -> Result<(), MigrateError> {
        let mut conn = self.get_pool().acquire().await?;
        if DB::HAS_SERVER {
            // Its search path is set to the schema.
            conn.close_on_drop();
        }
        let schema = match (self.tables.get(), &self.schema) {
            (Some(tables), _) => Some(tables.schema().to_owned()),
            (None, Some(schema)) => Some(quoted(schema)),
            (None, None) => {
                let found = DB::find_tables(&mut conn, None).await?;
                found.map(|found| quoted(&found.schema))
            }
        };
        DB::migrate(&mut conn, schema.as_deref()).await?;
        match DB::find_tables(&mut conn, self.schema.as_deref()).await? {
            Some(Found {
                flaw: Some(flaw), ..
            }) => Err(sqlx::Error::Configuration(flaw.into()).into()),
            found => {
                // Another schema than the one that was migrated may be the first one of the search path.
                _ = self.found(found);
                Ok(())
            }
        }
    }

    /// Checks that the fence in the database is fit for use: its tables are those of this version, `PUBLIC` may execute
    /// no function that has the rights of its owner, and no row-level security hides rows of its tables. The first
    /// use of a fence checks the same.
    ///
    /// # Errors
    ///
    /// [`AdmitError::Misconfigured`] says what makes it unfit, [`AdmitError::NotMigrated`] that tables are missing; otherwise
    /// as [`inspect`](Self::inspect).
    pub async fn check(&self) -> Result<(), AdmitError> {
        let mut transaction = Transaction::begin(&self.connections, self.limits).await?;
        let schema = self.schema.as_deref();
        let found = transaction.run(async |conn| DB::find_tables(conn, schema).await);
        self.found(found.await?)?;
        Ok(())
    }

    /// All that [`migrate`](Self::migrate) brings to an empty database, as one script, for those who
    /// migrate with another tool. Apply it in one transaction, with the schema of the tables in front of
    /// the search path. It writes the history of the migrations as well, so that `migrate` finds the
    /// tables current afterwards.
    ///
    /// ```
    /// # #[cfg(feature = "postgres")]
    /// println!("{}", tower_fence::Fence::<sqlx::Postgres>::schema_sql());
    /// ```
    ///
    /// Each version begins with a line such as `-- Version 2: idempotency`. Where the tables are those of
    /// an older version of this crate, apply what stands behind the last version that they have.
    #[must_use]
    pub fn schema_sql() -> String {
        DB::schema_sql()
    }

    /// Says in which schema the tables are (on SQLite: in which database file of the connection), or
    /// are to be made; the schema itself has to be there. Default: the first one of the search path that
    /// has them, as [`migrate`](Self::migrate) or the first use finds it.
    ///
    /// A fence has one schema. Where each tenant has a schema with tables of its own, each needs a
    /// fence of its own, too: a clone for which this is called shares the pool with the others, and nothing that was
    /// learned from the tables of another schema.
    #[must_use]
    pub fn schema(mut self, name: &str) -> Self {
        self.schema = Some(name.into());
        self.tables = Arc::default();
        self.queues = Arc::default();
        self.stale = Arc::default();
        self.handed_out = Arc::default();
        self
    }

    /// Reads `max_token`: the highest token that is dead; `None` where none is. For a resource without a
    /// row that is the floor of its partition; see [`remove_idle`](Self::remove_idle). Where the database was promoted
    /// or restored, more is dead on a resource that nobody has used since: see [`after_failover`](Self::after_failover).
    ///
    /// # Errors
    ///
    /// [`AdmitError::Busy`] or [`AdmitError::Unavailable`], as [`begin`](Self::begin).
    pub async fn inspect(&self, resource: &Resource) -> Result<Option<i64>, AdmitError> {
        // In a transaction, since a pooler in between gives each one a server of its own.
        let mut transaction = Transaction::begin(&self.connections, self.limits).await?;
        let tables = self.tables(&mut transaction).await?;
        let dead = transaction.run(async |conn| DB::dead(conn, &tables, resource).await);
        Ok(dead.await?.map(|dead| dead.max_token))
    }

    /// Where the tables are and what the server can do, for a transaction; looked up once.
    pub(super) async fn tables(
        &self,
        transaction: &mut Transaction<DB>,
    ) -> Result<Arc<Tables>, Failure> {
        if let Some(tables) = self.tables.get() {
            return Ok(Arc::clone(tables));
        }
        let find = async |conn: &mut DB::Connection| Ok(self.find_tables(conn).await);
        transaction.run(find).await?
    }

    /// The same on a connection, the caller's for example.
    pub(super) async fn find_tables(
        &self,
        conn: &mut DB::Connection,
    ) -> Result<Arc<Tables>, Failure> {
        if let Some(tables) = self.tables.get() {
            return Ok(Arc::clone(tables));
        }
        let schema = self.schema.as_deref();
        let found = DB::find_tables(conn, schema).await?;
        if found.is_none()
            && let Some(denied) = DB::find_denied(conn, schema).await?
        {
            return Err(Failure::no_usage(&denied));
        }
        self.found(found)
    }

    /// The same without a transaction.
    pub(super) async fn known_tables(&self) -> Result<Arc<Tables>, AdmitError> {
        if let Some(tables) = self.tables.get() {
            return Ok(Arc::clone(tables));
        }
        let mut transaction = Transaction::begin(&self.connections, self.limits).await?;
        Ok(self.tables(&mut transaction).await?)
    }

    /// Keeps what was found, unless the fence is unfit for use. Tables of an older version are not kept either: what they
    /// lack now says nothing about what they will have.
    fn found(&self, found: Option<Found>) -> Result<Arc<Tables>, Failure> {
        let Some(Found {
            schema,
            capabilities: Some(capabilities),
            flaw,
        }) = found
        else {
            return Err(Failure::not_migrated());
        };
        if let Some(flaw) = flaw {
            return Err(sqlx::Error::Configuration(flaw.into()).into());
        }
        let tables = self.tables.get_or_init(|| {
            if DB::HAS_SERVER && capabilities != Capabilities::ALL {
                tracing::warn!(%schema, "the database is not Postgres in full: {capabilities}");
            }
            if !capabilities.ends_sessions {
                self.connections.leave_sessions();
            }
            Arc::new(Tables::new(&schema, capabilities))
        });
        Ok(Arc::clone(tables))
    }

    /// Ends a transaction that is out of reach.
    pub(crate) async fn terminate(&self, lock: Option<AdvisoryLock>) {
        self.connections.terminate(lock, self.limits).await;
    }
}
