//! The Postgres that has the fence.

use std::{env, path::PathBuf, pin::pin, time::Duration};

use clap::{Args, builder::BoolishValueParser};
use reqwest::Url;
use sqlx::{
    Connection, PgConnection, Postgres,
    migrate::MigrateError,
    postgres::{PgConnectOptions, PgPoolOptions, PgSslMode},
};
use tokio::time::{sleep, timeout};
use tower_fence::{Fence, lease::PostgresLeases};

use crate::{
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
    pub fn set(&self, fence: Fence<Postgres>) -> Result<Fence<Postgres>, Failure> {
        let named = self.database_schema.as_deref();
        Ok(match named.filter(|schema| !schema.is_empty()) {
            Some(schema) => fence.schema(schema).map_err(|error| {
                Failure::configuration(format!("--database-schema {schema}: {error}"))
            })?,
            None => fence,
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
    pub fn set(&self, fence: Fence<Postgres>) -> Fence<Postgres> {
        fence.failover_detection(!self.no_failover_detection)
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
    pub async fn reached_directly(&self) -> Result<(Fence<Postgres>, String), Failure> {
        let Some(options) = self.listen()? else {
            return match self.transaction_pooling {
                true => Err(Failure::configuration(
                    "a migration does not go through a pooler in transaction mode: give in --listen-url \
                     (TOWER_FENCE_LISTEN_URL) a URL that leads to the Postgres itself",
                )),
                false => self.reached().await,
            };
        };
        let place = place(&options);
        let fence = self.over(options, 2)?;
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
            let options = fence.get_pool().connect_options().as_ref().clone();
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
        let url = self.find()?.ok_or_else(|| {
            Failure::configuration(
                "no database is named: set TOWER_FENCE_DATABASE_URL, to postgres://localhost/shop for example",
            )
        })?;
        let mut options = options(url.expose())?;
        let place = place(&options);
        if self.transaction_pooling {
            // A statement that was prepared on one server is unknown to the next.
            options = options.statement_cache_capacity(0);
        }
        let fence = self.over(options, connections)?;
        Ok((fence.transaction_pooling(self.transaction_pooling), place))
    }

    fn over(
        &self,
        options: PgConnectOptions,
        connections: u32,
    ) -> Result<Fence<Postgres>, Failure> {
        let pool = PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(Duration::from_secs(5))
            .connect_lazy_with(options);
        self.schema.set(Fence::new(pool))
    }
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

/// What becomes of a parameter of the URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parameter {
    /// The driver knows it.
    Honoured,
    /// The program behaves as the parameter asks, or the parameter only tunes the connection.
    Ignored,
    /// Without it, the connection would be another one than the URL asks for. The text says what to do instead.
    Refused(&'static str),
}

/// Reads a URL as libpq reads it.
fn options(url: &str) -> Result<PgConnectOptions, Failure> {
    let invalid = |why: &str| Failure::configuration(format!("invalid database URL: {why}"));
    let Some(rest) = ["postgres://", "postgresql://"]
        .iter()
        .find_map(|scheme| url.strip_prefix(scheme))
    else {
        return Err(invalid("it begins with postgres://"));
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    // In such a URL, a password would be read as something else, and then be shown.
    if path.contains('@') || path.contains('#') {
        return Err(invalid(
            "in a user and a password, write / as %2F, ? as %3F, # as %23 and @ as %40",
        ));
    }
    let (user, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    let several = "it names several hosts, and one is supported: name the primary, or an address that leads to it";
    if host.contains(',') {
        return Err(invalid(several));
    }
    // The parser of URLs takes no user without a host, as in `postgres://me@/shop`.
    let (whole, query_user) = match host.is_empty() && !user.is_empty() {
        true => (format!("postgres://{path}"), user),
        false => (format!("postgres://{rest}"), ""),
    };
    let mut whole = Url::parse(&whole).map_err(|error| invalid(&error.to_string()))?;
    let pairs: Vec<_> = whole.query_pairs().into_owned().collect();
    whole.set_query(None);
    let (mut mode, mut authority, mut name) = (None, None, None);
    for (parameter, value) in &pairs {
        match of(parameter, value) {
            Parameter::Honoured => {}
            Parameter::Ignored => {
                tracing::info!(parameter, "a parameter of the database URL has no effect");
                continue;
            }
            Parameter::Refused(instead) => {
                let text = format!("the parameter {parameter} is not supported; {instead}");
                return Err(invalid(&text));
            }
        }
        match &**parameter {
            "host" | "hostaddr" | "port" if value.contains(',') => return Err(invalid(several)),
            "sslmode" | "ssl-mode" => mode = Some(value.to_ascii_lowercase()),
            "sslrootcert" | "ssl-root-cert" | "ssl-ca" => {
                authority = Some(value.clone());
                if value == SYSTEM {
                    continue;
                }
            }
            "fallback_application_name" => {
                name = Some(value.clone());
                continue;
            }
            _ => {}
        }
        whole.query_pairs_mut().append_pair(parameter, value);
    }
    if !query_user.is_empty() {
        let (user, password) = query_user.split_once(':').unwrap_or((query_user, ""));
        let mut query = whole
            .query()
            .map(|query| format!("{query}&"))
            .unwrap_or_default();
        for (parameter, value) in [("user", user), ("password", password)] {
            if !value.is_empty() {
                query.push_str(&format!("{parameter}={}&", value.replace('+', "%2B")));
            }
        }
        whole.set_query(Some(query.trim_end_matches('&')));
    }
    let mut options: PgConnectOptions = whole
        .as_str()
        .parse()
        .map_err(|error| invalid(&chain(&error)))?;
    if let Some(host) = options.get_host().strip_prefix('[') {
        let host = host.trim_end_matches(']').to_owned();
        options = options.host(&host);
    }
    // PgBouncer refuses this parameter unless it is told to ignore it, and the fence has no such numbers.
    options = options.extra_float_digits(None);
    if options.get_application_name().is_none() {
        options = options.application_name(name.as_deref().unwrap_or("tower-fence"));
    }
    let from_environment = || {
        env::var("PGSSLROOTCERT")
            .ok()
            .filter(|file| !file.is_empty())
    };
    let verifies = match authority.or_else(from_environment) {
        None => None,
        Some(authority) if authority == SYSTEM => match mode.as_deref() {
            None | Some("verify-full") => Some(PgSslMode::VerifyFull),
            Some(_) => return Err(invalid("sslrootcert=system takes sslmode=verify-full")),
        },
        // libpq verifies here, too.
        Some(_) if matches!(options.get_ssl_mode(), PgSslMode::Require) => {
            Some(PgSslMode::VerifyCa)
        }
        Some(_) => None,
    };
    Ok(match verifies {
        Some(mode) => options.ssl_mode(mode),
        None => options,
    })
}

/// The authorities of the system, as libpq names them.
const SYSTEM: &str = "system";

/// What becomes of this parameter: those of libpq, and those that only sqlx has.
fn of(parameter: &str, value: &str) -> Parameter {
    use Parameter::{Honoured, Ignored, Refused};
    match parameter {
        "sslmode"
        | "ssl-mode"
        | "sslrootcert"
        | "ssl-root-cert"
        | "ssl-ca"
        | "sslcert"
        | "ssl-cert"
        | "sslkey"
        | "ssl-key"
        | "statement-cache-capacity"
        | "host"
        | "hostaddr"
        | "port"
        | "dbname"
        | "user"
        | "password"
        | "application_name"
        | "fallback_application_name"
        | "options" => Honoured,
        _ if parameter.starts_with("options[") => Honoured,
        "connect_timeout"
        | "keepalives"
        | "keepalives_idle"
        | "keepalives_interval"
        | "keepalives_count"
        | "tcp_user_timeout"
        | "client_encoding"
        | "sslsni"
        | "sslcompression"
        | "sslkeylogfile"
        | "load_balance_hosts"
        | "krbsrvname"
        | "gsslib"
        | "gssdelegation"
        | "min_protocol_version"
        | "max_protocol_version" => Ignored,
        "channel_binding" if value != "require" => Ignored,
        "channel_binding" => Refused("use sslmode=verify-full"),
        "gssencmode" if value != "require" => Ignored,
        "gssencmode" => Refused("use TLS: sslmode=verify-full"),
        // A database that refuses writes is reported by /readyz.
        "target_session_attrs" if !matches!(value, "read-only" | "standby") => Ignored,
        "target_session_attrs" => Refused("the fence writes: name the primary"),
        "ssl_min_protocol_version" if value != "TLSv1.3" => Ignored,
        "ssl_min_protocol_version" => Refused("set it in the server's configuration"),
        "ssl_max_protocol_version" if value == "TLSv1.3" || value.is_empty() => Ignored,
        "ssl_max_protocol_version" => Refused("set it in the server's configuration"),
        "sslnegotiation" if value != "direct" => Ignored,
        "sslnegotiation" => Refused("leave it out: the server has to take the usual negotiation"),
        "sslcertmode" if value == "allow" => Ignored,
        "sslcertmode" => {
            Refused("name a client certificate in sslcert and sslkey, or leave them out")
        }
        "sslcrl" | "sslcrldir" => Refused(
            "revoked certificates are not looked up: name an authority of your own in sslrootcert",
        ),
        "sslpassword" => Refused("use a key without a passphrase"),
        "requiressl" | "ssl" => Refused("use sslmode=require, or verify-full"),
        "passfile" => Refused("name the file in the variable PGPASSFILE"),
        "service" | "servicefile" => {
            Refused("write the host, the user and the database into the URL")
        }
        "require_auth" => {
            Refused("have the server demand it, in pg_hba.conf, and use sslmode=verify-full")
        }
        "requirepeer" => Refused("use a directory for the socket that only the server writes to"),
        _ => Refused(
            "sslmode, sslrootcert, sslcert, sslkey, host, port, dbname, user, password, application_name and options are",
        ),
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
    let options = fence.get_pool().connect_options();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_that_psql_accepts_are_read_alike() {
        let read = |url: &str| options(url).unwrap_or_else(|error| panic!("{url}: {error:?}"));
        let v6 = read("postgres://me:p%2Bw@[::1]:7/shop?connect_timeout=3&application_name=till");
        assert_eq!((v6.get_host(), v6.get_port()), ("::1", 7));
        assert_eq!(v6.get_application_name(), Some("till"));
        let socket = read("postgresql://me%40x@/shop?host=/run/pg&keepalives=1");
        assert_eq!(socket.get_socket(), Some(&PathBuf::from("/run/pg")));
        assert_eq!(socket.get_username(), "me@x");
        assert_eq!(socket.get_database(), Some("shop"));
        assert_eq!(socket.get_application_name(), Some("tower-fence"));
        let fallback = read("postgres://db/shop?fallback_application_name=till");
        assert_eq!(fallback.get_application_name(), Some("till"));
    }

    #[test]
    fn certificates_are_verified_when_libpq_verifies_them() {
        let mode = |query: &str| {
            let url = format!("postgres://db/shop?{query}");
            options(&url).map(|options| options.get_ssl_mode())
        };
        for (query, expected) in [
            ("sslmode=require", PgSslMode::Require),
            ("sslmode=require&sslrootcert=a.pem", PgSslMode::VerifyCa),
            ("sslrootcert=a.pem&sslmode=require", PgSslMode::VerifyCa),
            ("sslmode=prefer&sslrootcert=a.pem", PgSslMode::Prefer),
            (
                "sslmode=verify-full&sslrootcert=a.pem",
                PgSslMode::VerifyFull,
            ),
            ("sslrootcert=system", PgSslMode::VerifyFull),
        ] {
            let found = mode(query).unwrap();
            assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{query}");
        }
        assert!(mode("sslrootcert=system&sslmode=require").is_err());
    }

    #[test]
    fn each_parameter_that_is_refused_is_named() {
        for (query, name) in [
            ("channel_binding=require", "channel_binding"),
            ("target_session_attrs=standby", "target_session_attrs"),
            ("passfile=hunter2", "passfile"),
            ("service=hunter2", "service"),
            (
                "ssl_min_protocol_version=TLSv1.3",
                "ssl_min_protocol_version",
            ),
            ("pgbouncer=hunter2", "pgbouncer"),
        ] {
            let refused = options(&format!("postgres://me:hunter2@db/shop?{query}")).unwrap_err();
            assert!(refused.text.contains(name), "{}", refused.text);
            assert!(!refused.text.contains("hunter2"), "{}", refused.text);
        }
        for url in [
            "postgres://me:hunter2@a,b/shop",
            "postgres://me:hunter2@a:1,b:2/shop",
            "postgres:///shop?host=a,b",
            "postgres://a/shop?port=1,2",
        ] {
            let refused = options(url).unwrap_err();
            assert!(refused.text.contains("several hosts"), "{}", refused.text);
        }
    }
}
