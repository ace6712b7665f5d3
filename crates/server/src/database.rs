//! The Postgres database with the fence.

use std::{error::Error, path::PathBuf, time::Duration};

use clap::{Args, builder::BoolishValueParser};
use sqlx::{
    ConnectOptions, Connection, PgConnection, PgPool, Postgres,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::timeout;
use tower_fence::{AdmitError, Fence, FenceBuilder, lease::PostgresLeases};

use crate::{
    database_url::options,
    failure::{Failure, chain},
    pooler,
    secrets::Secret,
};

/// The timeout for connecting, in commands other than `serve`.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Args)]
#[command(next_help_heading = "Database")]
pub struct DatabaseArgs {
    /// The Postgres database with the fence: postgres://user@host/database
    ///
    /// A URL with a password is accepted only in the variable TOWER_FENCE_DATABASE_URL (or
    /// DATABASE_URL) or in a file, because other users of the machine can see the command line. For
    /// TLS, add `?sslmode=verify-full`, and `&sslrootcert=FILE` for your own certificate authority.
    /// The variable DATABASE_URL is used only if no other setting names a database.
    #[arg(long, value_name = "URL")]
    pub database_url: Option<String>,
    /// A file with that URL.
    #[arg(long, env = "TOWER_FENCE_DATABASE_URL_FILE", value_name = "FILE")]
    pub database_url_file: Option<PathBuf>,
    #[command(flatten)]
    pub schema: SchemaArgs,
    /// Adapts to a pooler in transaction mode in front of the database, such as PgBouncer with
    /// `pool_mode = transaction`.
    #[arg(
        long,
        env = "TOWER_FENCE_TRANSACTION_POOLING",
        value_parser = BoolishValueParser::new()
    )]
    pub transaction_pooling: bool,
    /// A URL of the same database that bypasses the pooler, for migrations and for the connection
    /// that listens for notifications.
    ///
    /// A URL with a password is accepted only in the variable TOWER_FENCE_LISTEN_URL or in a file.
    /// Behind a pooler without this URL, waiters poll four times a second and are not served in
    /// order.
    #[arg(long, value_name = "URL")]
    pub listen_url: Option<String>,
    /// A file with that URL.
    #[arg(long, env = "TOWER_FENCE_LISTEN_URL_FILE", value_name = "FILE")]
    pub listen_url_file: Option<PathBuf>,
}

/// The option for creating the tables.
#[derive(Args, Default)]
#[command(next_help_heading = "Database")]
pub struct FirstMigrationArgs {
    /// Creates the tables even if Postgres does not show its timeline, which the fence needs to
    /// detect a failover.
    ///
    /// After each promotion and each restore, you must then run `SELECT
    /// tower_fence.after_failover()` before any client writes. Otherwise a confirmed write can be
    /// lost. This option has no effect if the tables exist.
    #[arg(
        long,
        env = "TOWER_FENCE_NO_FAILOVER_DETECTION",
        value_parser = BoolishValueParser::new()
    )]
    pub no_failover_detection: bool,
}

impl FirstMigrationArgs {
    pub fn set(&self, builder: FenceBuilder<Postgres>) -> FenceBuilder<Postgres> {
        builder.failover_detection(!self.no_failover_detection)
    }
}

impl DatabaseArgs {
    /// Returns the URL of the database; `None` if none is configured. The variable `DATABASE_URL`
    /// is used only if no other setting names a database.
    pub fn find(&self) -> Result<Option<Secret>, Failure> {
        let option = self.database_url.as_deref();
        let file = self.database_url_file.as_deref();
        let own = Secret::find_urls("TOWER_FENCE_DATABASE_URL", option, file)?;
        match own {
            Some(url) => Ok(Some(url)),
            None => Secret::find("DATABASE_URL", None),
        }
    }

    /// Returns the fence after its database has answered, for commands other than `serve`.
    pub async fn reached(&self) -> Result<(Fence<Postgres>, String), Failure> {
        let (fence, place) = self.fence(2)?;
        self.check(&fence, &place).await?;
        Ok((fence, place))
    }

    /// Returns the fence after its database has answered, for commands that change the schema.
    /// Bypasses a pooler, because a migration takes a lock that outlives a transaction.
    pub async fn reached_directly(
        &self,
        first: &FirstMigrationArgs,
    ) -> Result<(Fence<Postgres>, String), Failure> {
        // The text of a migration is too long for a warning about a slow statement.
        let options = self.direct()?.disable_statement_logging();
        let place = place(&options);
        let fence = first.set(self.schema.builder()?).build(pool(options, 2));
        self.check(&fence, &place).await?;
        Ok((fence, place))
    }

    /// Returns the options of a connection that bypasses a pooler, for a change of the schema.
    pub fn direct(&self) -> Result<PgConnectOptions, Failure> {
        match self.listen()? {
            Some(options) => Ok(options),
            None if self.transaction_pooling => Err(Failure::configuration(
                "the schema cannot be changed through a pooler in transaction mode: set --listen-url \
                 (TOWER_FENCE_LISTEN_URL) to a URL that leads directly to Postgres",
            )),
            None => self.options(),
        }
    }

    async fn check(&self, fence: &Fence<Postgres>, place: &str) -> Result<(), Failure> {
        let reached = reach(fence, CONNECT_TIMEOUT).await;
        reached.map_err(|error| not_connected(place, &*error))?;
        self.refuse_poolers(fence, place).await
    }

    /// Fails if there is an unexpected pooler in transaction mode. Checks the URL of the fence,
    /// unless `transaction_pooling` is set, and the URL of the connection that listens.
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
            let found = timeout(CONNECT_TIMEOUT, pooler::is_between(&options)).await;
            let found = found.unwrap_or(Err(sqlx::Error::PoolTimedOut));
            if found.map_err(|error| not_connected(&place, &error))? {
                let text = format!("{place}: {}", pooler::REFUSED);
                return Err(Failure::configuration(text));
            }
        }
        Ok(())
    }

    /// Returns the options of the connection that listens, if it has its own URL.
    pub fn listen(&self) -> Result<Option<PgConnectOptions>, Failure> {
        let option = self.listen_url.as_deref();
        let file = self.listen_url_file.as_deref();
        let url = Secret::find_urls("TOWER_FENCE_LISTEN_URL", option, file)?;
        url.map(|url| options(url.expose())).transpose()
    }

    /// Creates the lease store in the database of this fence.
    pub fn leases(&self, fence: Fence<Postgres>) -> Result<PostgresLeases, Failure> {
        let leases = PostgresLeases::new(fence);
        Ok(match self.listen()? {
            Some(options) => leases.listen_with(options),
            None => leases,
        })
    }

    /// Creates the fence over a pool that connects on first use. Also returns its location for
    /// messages.
    pub fn fence(&self, connections: u32) -> Result<(Fence<Postgres>, String), Failure> {
        let mut options = self.options()?;
        let place = place(&options);
        if self.transaction_pooling {
            // Behind a pooler, a statement that was prepared on one server connection is unknown on
            // the next one. The texts of statements contain the digests of lease ids, so sqlx must
            // not log them.
            options = options
                .statement_cache_capacity(0)
                .disable_statement_logging();
        }
        let builder = self.schema.builder()?;
        let builder = builder.transaction_pooling(self.transaction_pooling);
        Ok((builder.build(pool(options, connections)), place))
    }

    fn options(&self) -> Result<PgConnectOptions, Failure> {
        let url = self.find()?.ok_or_else(|| {
            Failure::configuration(
                "no database is configured: set TOWER_FENCE_DATABASE_URL, for example to postgres://localhost/shop",
            )
        })?;
        options(url.expose())
    }
}

/// The option that names the schema of the tables.
#[derive(Args)]
#[command(next_help_heading = "Database")]
pub struct SchemaArgs {
    /// The schema with the fence's tables [default: tower_fence]. A reserved keyword of SQL cannot
    /// be its name.
    #[arg(long, env = "TOWER_FENCE_DATABASE_SCHEMA", value_name = "NAME")]
    pub database_schema: Option<String>,
}

impl SchemaArgs {
    /// Returns the name of the schema. An empty name counts as missing.
    pub fn name(&self) -> &str {
        let name = self.database_schema.as_deref();
        name.filter(|name| !name.is_empty())
            .unwrap_or("tower_fence")
    }

    pub fn builder(&self) -> Result<FenceBuilder<Postgres>, Failure> {
        let name = self.name();
        let builder = Fence::builder().schema(name);
        builder
            .map_err(|error| Failure::configuration(format!("--database-schema {name}: {error}")))
    }
}

/// Creates a pool that connects on first use.
fn pool(options: PgConnectOptions, connections: u32) -> PgPool {
    PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(Duration::from_secs(5))
        .connect_lazy_with(options)
}

/// Returns the name and the address of a database for messages.
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

fn not_connected(place: &str, error: &(dyn Error + 'static)) -> Failure {
    Failure::unavailable(&format!("cannot connect to the database {place}"), error)
}

/// Returns whether a failed statement may succeed later without a change of the program or of its
/// settings. This is always the case if the statement did not reach the server.
pub fn may_pass(error: &sqlx::Error) -> bool {
    // Codes, and classes of codes.
    const TEMPORARY: [&str; 8] = [
        "25006", // read-only, as a standby that can be promoted
        "55006", // object in use
        "55P03", // lock not available
        "08",    // connections
        "40",    // conflicts
        "53",    // resources
        "57",    // interventions of an operator
        "58",    // errors of the system
    ];
    if matches!(error, sqlx::Error::Configuration(_)) {
        return false;
    }
    error.as_database_error().is_none_or(|refused| {
        let code = refused.code().unwrap_or_default();
        TEMPORARY
            .iter()
            .any(|temporary| code.starts_with(temporary))
    })
}

/// Converts an error of the fence. `what` describes the state after an error that may pass.
pub fn failed(what: &str, place: &str, error: &AdmitError) -> Failure {
    match error {
        AdmitError::NotMigrated(cause) | AdmitError::Misconfigured(cause) => {
            Failure::configuration(format!("{place}: {}", chain(cause)))
        }
        error => Failure::unavailable(what, error),
    }
}

/// Connects once without the pool, because the pool would retry and hide the cause of a failure.
pub async fn reach(
    fence: &Fence<Postgres>,
    limit: Duration,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let options = fence.pool().connect_options();
    match timeout(limit, PgConnection::connect_with(&options)).await {
        Ok(Ok(conn)) => {
            _ = conn.close().await;
            Ok(())
        }
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err("no answer in time".into()),
    }
}
