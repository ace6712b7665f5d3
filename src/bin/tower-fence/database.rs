//! The Postgres that has the fence.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use sqlx::{
    Connection, PgConnection, Postgres,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::timeout;
use tower_fence::Fence;

use crate::{
    failure::{Failure, UNAVAILABLE, chain},
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
    /// The schema with the fence's tables. Default: the first one of the search path that has them.
    #[arg(
        long,
        env = "TOWER_FENCE_DATABASE_SCHEMA",
        value_name = "NAME",
        help_heading = "Database"
    )]
    pub database_schema: Option<String>,
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
        let reached = reach(&fence, Duration::from_secs(10)).await;
        let failed = |error| Failure::new(UNAVAILABLE, format!("no database {place}: {error}"));
        reached.map_err(failed)?;
        Ok((fence, place))
    }

    /// The fence, over a pool that connects when it is used.
    pub fn fence(&self, connections: u32) -> Result<(Fence<Postgres>, String), Failure> {
        let url = self.find()?.ok_or_else(|| {
            Failure::configuration(
                "no database is named: set TOWER_FENCE_DATABASE_URL, to postgres://localhost/shop for example",
            )
        })?;
        if !url.expose().starts_with("postgres://") && !url.expose().starts_with("postgresql://") {
            return Err(Failure::configuration(
                "the URL of the database begins with postgres://",
            ));
        }
        well_formed(url.expose())?;
        let options: PgConnectOptions = url.expose().parse().map_err(|error| {
            Failure::configuration(format!(
                "the URL of the database is none: {}",
                chain(&error)
            ))
        })?;
        let name = options.get_database().unwrap_or(options.get_username());
        let place = match options.get_socket() {
            Some(socket) => format!("{name} in {}", socket.display()),
            None => format!("{name} on {}:{}", options.get_host(), options.get_port()),
        };
        let pool = PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(Duration::from_secs(5))
            .connect_lazy_with(options.application_name("tower-fence"));
        let fence = Fence::new(pool);
        let schema = self.database_schema.as_deref();
        let fence = match schema.filter(|schema| !schema.is_empty()) {
            Some(schema) => fence.schema(schema),
            None => fence,
        };
        Ok((fence, place))
    }
}

/// What a URL of Postgres may say behind its `?`.
const PARAMETERS: [&str; 17] = [
    "sslmode",
    "ssl-mode",
    "sslrootcert",
    "ssl-root-cert",
    "ssl-ca",
    "sslcert",
    "ssl-cert",
    "sslkey",
    "ssl-key",
    "statement-cache-capacity",
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "application_name",
];

/// Refuses a URL in which a password would be read as something else, and then be shown.
fn well_formed(url: &str) -> Result<(), Failure> {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let path = rest.find(['/', '?', '#']).map_or("", |end| &rest[end..]);
    if path.contains('@') || url.contains('#') {
        return Err(Failure::configuration(
            "the URL of the database is none: in a user and a password, write / as %2F, ? as %3F, # as %23 and @ as %40",
        ));
    }
    let query = path.split_once('?').map_or("", |(_, query)| query);
    let is_known = |pair: &str| {
        let name = pair.split('=').next().unwrap_or_default();
        PARAMETERS.contains(&name) || name.starts_with("options")
    };
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    if !pairs.into_iter().all(is_known) {
        return Err(Failure::configuration(
            "the URL of the database has a parameter that is none: sslmode, sslrootcert, sslcert, sslkey, host, port, \
             dbname, user, password, application_name and options are some",
        ));
    }
    Ok(())
}

/// Connects once, beside the pool, which tries again and again and does not tell why.
pub async fn reach(fence: &Fence<Postgres>, limit: Duration) -> Result<(), String> {
    let options = fence.get_pool().connect_options();
    match timeout(limit, PgConnection::connect_with(&options)).await {
        Ok(Ok(conn)) => {
            _ = conn.close().await;
            Ok(())
        }
        Ok(Err(error)) => Err(chain(&error)),
        Err(_) => Err("no answer in time".into()),
    }
}
