//! The Postgres that has the fence.

use std::{path::PathBuf, pin::pin, time::Duration};

use clap::{Args, builder::BoolishValueParser};
use sqlx::{
    Connection, PgConnection, PgPool, Postgres,
    migrate::MigrateError,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::{sleep, timeout};
use tower_fence::{Fence, FenceBuilder, lease::PostgresLeases};

use crate::{
    database_url::options,
    failure::{Failure, UNAVAILABLE, chain},
    pooler,
    secrets::Secret,
};

#[derive(Args)]
pub struct DatabaseArgs {
    /// The Postgres with the fence: postgres://user@host/database
    ///
    /// With a password it belongs into the variable TOWER_FENCE_DATABASE_URL (or DATABASE_URL), or into a file, and
    /// is refused here: everybody sees the command line. For TLS add `?sslmode=verify-full`, and `&sslrootcert=FILE`
    /// where the authority is your own.
    #[arg(long, value_name = "URL", help_heading = "Database")]
    pub database_url: Option<String>,
    /// A file with that URL.
    #[arg(
        long,
        env = "TOWER_FENCE_DATABASE_URL_FILE",
        value_name = "FILE",
        help_heading = "Database"
    )]
    pub database_url_file: Option<PathBuf>,
    #[command(flatten)]
    pub schema: SchemaArgs,
    /// Expects a pooler in transaction mode in front of the database, such as PgBouncer with `pool_mode = transaction`.
    #[arg(
        long,
        env = "TOWER_FENCE_TRANSACTION_POOLING",
        value_parser = BoolishValueParser::new(),
        help_heading = "Database"
    )]
    pub transaction_pooling: bool,
    /// A URL of the same database that leads past the pooler: for migrations, and for the connection that listens.
    ///
    /// With a password it belongs into the variable TOWER_FENCE_LISTEN_URL, or into a file. Without it, waiters poll
    /// four times a second and are not served in their order.
    #[arg(long, value_name = "URL", help_heading = "Database")]
    pub listen_url: Option<String>,
    /// A file with that URL.
    #[arg(
        long,
        env = "TOWER_FENCE_LISTEN_URL_FILE",
        value_name = "FILE",
        help_heading = "Database"
    )]
    pub listen_url_file: Option<PathBuf>,
}

/// Where the tables are.
#[derive(Args)]
pub struct SchemaArgs {
    /// The schema with the fence's tables [default: tower_fence].
    #[arg(
        long,
        env = "TOWER_FENCE_DATABASE_SCHEMA",
        value_name = "NAME",
        help_heading = "Database"
    )]
    pub database_schema: Option<String>,
}

impl SchemaArgs {
    pub fn builder(&self) -> Result<FenceBuilder<Postgres>, Failure> {
        let named = self.database_schema.as_deref();
        Ok(match named.filter(|schema| !schema.is_empty()) {
            Some(schema) => Fence::builder().schema(schema).map_err(|error| {
                Failure::configuration(format!("--database-schema {schema}: {error}"))
            })?,
            None => Fence::builder(),
        })
    }
}

/// How tables are made that are not there yet.
#[derive(Args)]
pub struct FirstMigrationArgs {
    /// Makes the tables even if Postgres does not show its timeline, by which a failover is noticed.
    ///
    /// Then after each promotion and each restore, `SELECT tower_fence.after_failover()` has to come before any
    /// client writes, or a confirmed write can be lost. Changes nothing where the tables are there.
    #[arg(
        long,
        env = "TOWER_FENCE_NO_FAILOVER_DETECTION",
        value_parser = BoolishValueParser::new(),
        help_heading = "Database"
    )]
    pub no_failover_detection: bool,
}

impl FirstMigrationArgs {
    pub fn set(&self, builder: FenceBuilder<Postgres>) -> FenceBuilder<Postgres> {
        builder.failover_detection(!self.no_failover_detection)
    }
}

impl DatabaseArgs {
    /// Whether a database is named at all.
    pub fn find(&self) -> Result<Option<Secret>, Failure> {
        let option = self.database_url.as_deref();
        let file = self.database_url_file.as_ref();
        let own = Secret::find_urls("TOWER_FENCE_DATABASE_URL", option, file)?;
        match own {
            Some(url) => Ok(Some(url)),
            None => Secret::find("DATABASE_URL", None),
        }
    }

    /// The fence, once its database has answered; for commands that are no server.
    pub async fn reached(&self) -> Result<(Fence<Postgres>, String), Failure> {
        let (fence, place) = self.fence(2)?;
        self.answers(&fence, &place).await?;
        self.refuse_poolers(&fence, &place).await?;
        Ok((fence, place))
    }

    /// The same for a migration, which takes a lock that outlives a transaction: past a pooler.
    pub async fn reached_directly(
        &self,
        first: &FirstMigrationArgs,
    ) -> Result<(Fence<Postgres>, String), Failure> {
        let options = match self.listen()? {
            Some(options) => options,
            None if self.transaction_pooling => {
                return Err(Failure::configuration(
                    "a migration does not go through a pooler in transaction mode: give in --listen-url \
                     (TOWER_FENCE_LISTEN_URL) a URL that leads to the Postgres itself",
                ));
            }
            None => self.options()?,
        };
        let place = place(&options);
        let fence = first.set(self.schema.builder()?).build(pool(options, 2));
        self.answers(&fence, &place).await?;
        self.refuse_poolers(&fence, &place).await?;
        Ok((fence, place))
    }

    async fn answers(&self, fence: &Fence<Postgres>, place: &str) -> Result<(), Failure> {
        let reached = reach(fence, Duration::from_secs(10)).await;
        let failed = |error| Failure::new(UNAVAILABLE, format!("no database {place}: {error}"));
        reached.map_err(failed)
    }

    /// Refuses a pooler in transaction mode where none is expected: in front of the fence, and of what listens.
    pub async fn refuse_poolers(
        &self,
        fence: &Fence<Postgres>,
        place: &str,
    ) -> Result<(), Failure> {
        let direct = self
            .listen()?
            .map(|options| (self::place(&options), options));
        let pooled = (!self.transaction_pooling).then(|| {
            let options = fence.pool().connect_options().as_ref().clone();
            (place.to_owned(), options)
        });
        for (place, options) in pooled.into_iter().chain(direct) {
            let found = timeout(Duration::from_secs(10), pooler::is_between(&options)).await;
            let found = found.unwrap_or_else(|_| Err(sqlx::Error::PoolTimedOut));
            let failed = |error| Failure::unavailable(&format!("no database {place}"), &error);
            if found.map_err(failed)? {
                return Err(Failure::configuration(format!(
                    "{place}: {}",
                    pooler::REFUSED
                )));
            }
        }
        Ok(())
    }

    /// How the connection is made that listens, if it is made otherwise than the others.
    pub fn listen(&self) -> Result<Option<PgConnectOptions>, Failure> {
        let option = self.listen_url.as_deref();
        let file = self.listen_url_file.as_ref();
        let url = Secret::find_urls("TOWER_FENCE_LISTEN_URL", option, file)?;
        url.map(|url| options(url.expose())).transpose()
    }

    /// Leases in the database of this fence.
    pub fn leases(&self, fence: Fence<Postgres>) -> Result<PostgresLeases, Failure> {
        let leases = PostgresLeases::new(fence);
        Ok(match self.listen()? {
            Some(options) => leases.listen_with(options),
            None => leases,
        })
    }

    /// The fence, over a pool that connects when it is used.
    pub fn fence(&self, connections: u32) -> Result<(Fence<Postgres>, String), Failure> {
        let mut options = self.options()?;
        let place = place(&options);
        if self.transaction_pooling {
            // A statement that was prepared on one server is unknown to the next.
            options = options.statement_cache_capacity(0);
        }
        let builder = self.schema.builder()?;
        let builder = builder.transaction_pooling(self.transaction_pooling);
        Ok((builder.build(pool(options, connections)), place))
    }

    fn options(&self) -> Result<PgConnectOptions, Failure> {
        let url = self.find()?.ok_or_else(|| {
            Failure::configuration(
                "no database is named: set TOWER_FENCE_DATABASE_URL, to postgres://localhost/shop for example",
            )
        })?;
        options(url.expose())
    }
}

/// A pool that connects when it is used.
fn pool(options: PgConnectOptions, connections: u32) -> PgPool {
    PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(Duration::from_secs(5))
        .connect_lazy_with(options)
}

/// Where a database is, for people.
fn place(options: &PgConnectOptions) -> String {
    let name = options.get_database().unwrap_or(options.get_username());
    match options.get_socket() {
        Some(socket) => format!("{name} in {}", socket.display()),
        None if options.get_host().contains(':') => {
            format!("{name} on [{}]:{}", options.get_host(), options.get_port())
        }
        None => format!("{name} on {}:{}", options.get_host(), options.get_port()),
    }
}

/// Whether a migration may succeed later, with nothing changed: what the server refuses by these classes of errors
/// (connection, transaction, resources, locks, intervention, system), and what never reached it.
fn may_pass(error: &MigrateError) -> bool {
    let (MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _)) = error else {
        return false;
    };
    error.as_database_error().is_none_or(|refused| {
        let code = refused.code().unwrap_or_default();
        ["08", "40", "53", "55", "57", "58"]
            .iter()
            .any(|class| code.starts_with(class))
    })
}

/// How long a migration runs before the log says what it waits for, and how often after that.
const LONG: Duration = Duration::from_secs(2);

/// Brings the tables up to date. While another transaction is in the way, the log names it.
pub async fn migrate(fence: &Fence<Postgres>, place: &str) -> Result<(), Failure> {
    let mut migrating = pin!(fence.migrate());
    loop {
        tokio::select! {
            migrated = &mut migrating => {
                return migrated.map_err(|error| {
                    let failed = Failure::unavailable(&format!("no migration of {place}"), &error);
                    match may_pass(&error) {
                        true => failed,
                        false => Failure::configuration(failed.text),
                    }
                });
            }
            () = sleep(LONG) => {
                let waits_for = timeout(LONG, blockers(fence)).await;
                let waits_for = waits_for.ok().and_then(Result::ok).flatten();
                let waits_for = waits_for.as_deref().unwrap_or("the database");
                tracing::warn!(%place, waits_for, "still migrating");
            }
        }
    }
}

/// The sessions that hold locks which sessions of this program wait for.
async fn blockers(fence: &Fence<Postgres>) -> sqlx::Result<Option<String>> {
    let options = fence.pool().connect_options();
    let mut conn = PgConnection::connect_with(&options).await?;
    let found = sqlx::query_scalar(BLOCKERS).fetch_one(&mut conn).await?;
    conn.close().await?;
    Ok(found)
}

const BLOCKERS: &str = "\
    SELECT pg_catalog.string_agg(DISTINCT pg_catalog.format('the lock of process %s (%s, %s, in a transaction since %s s)', \
        b.pid, coalesce(nullif(b.application_name, ''), 'no name'), coalesce(b.state, 'state unknown'), \
        coalesce(pg_catalog.round(extract(epoch FROM pg_catalog.clock_timestamp() - b.xact_start))::text, '?')), '; ') \
    FROM pg_catalog.pg_stat_activity AS a \
    CROSS JOIN LATERAL pg_catalog.unnest(pg_catalog.pg_blocking_pids(a.pid)) AS in_the_way (pid) \
    JOIN pg_catalog.pg_stat_activity AS b ON b.pid = in_the_way.pid \
    WHERE a.wait_event_type = 'Lock' AND a.datname = pg_catalog.current_database() AND a.usename = current_user \
        AND a.application_name = pg_catalog.current_setting('application_name')";

/// Connects once, beside the pool, which tries again and again and does not tell why.
pub async fn reach(fence: &Fence<Postgres>, limit: Duration) -> Result<(), String> {
    let options = fence.pool().connect_options();
    match timeout(limit, PgConnection::connect_with(&options)).await {
        Ok(Ok(conn)) => {
            _ = conn.close().await;
            Ok(())
        }
        Ok(Err(error)) => Err(chain(&error)),
        Err(_) => Err("no answer in time".into()),
    }
}
