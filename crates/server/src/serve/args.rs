//! What `serve` can be told.

use std::{path::PathBuf, time::Duration};

use clap::{Args, builder::BoolishValueParser};

use super::{etcd::EtcdArgs, redis::RedisArgs};
use crate::{
    database::{DatabaseArgs, FirstMigrationArgs},
    duration::duration,
    logs::Format,
};

/// Grants leases over HTTP.
///
/// Every option has an environment variable: TOWER_FENCE_ and its name, in capitals. Signals: TERM and INT stop
/// gracefully, a second one at once; HUP reads secrets, token keys and the certificate again.
///
/// The leases are under /locks, described at /locks/openapi.json; operators have a page at /console. /healthz, /readyz and
/// /metrics (Prometheus) stand beside, open to everybody.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct ServeArgs {
    /// A file with settings (TOML), each under the name of its option: `listen = "127.0.0.1:4120"`.
    ///
    /// An option on the command line or in the environment replaces the setting. The file contains no secret, but may name
    /// files with secrets.
    #[arg(long, env = "TOWER_FENCE_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where to listen: an address and a port. Port 0 takes a free one.
    #[arg(
        long,
        env = "TOWER_FENCE_LISTEN",
        value_name = "ADDRESS",
        default_value = "127.0.0.1:4120"
    )]
    pub listen: String,
    #[command(flatten)]
    pub access: AccessArgs,
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// The most connections to the database, beside one that listens.
    #[arg(long, env = "TOWER_FENCE_DATABASE_CONNECTIONS", value_name = "NUMBER", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..), help_heading = "Database")]
    pub database_connections: u32,
    /// Brings the tables up to date first, as `tower-fence migrate` does.
    #[arg(long, env = "TOWER_FENCE_MIGRATE", value_parser = BoolishValueParser::new(), help_heading = "Database")]
    pub migrate: bool,
    #[command(flatten)]
    pub first: FirstMigrationArgs,
    #[command(flatten)]
    pub redis: RedisArgs,
    #[command(flatten)]
    pub etcd: EtcdArgs,
    #[command(flatten)]
    pub leases: LeaseArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    /// The form of the log, which goes to standard error.
    #[arg(
        long,
        env = "TOWER_FENCE_LOG_FORMAT",
        value_name = "FORMAT",
        default_value = "plain",
        help_heading = "Log"
    )]
    pub log_format: Format,
    /// What is logged: error, warn, info, debug, trace, also by part.
    #[arg(
        long,
        env = "TOWER_FENCE_LOG",
        value_name = "FILTER",
        default_value = "info,sqlx=warn",
        help_heading = "Log"
    )]
    pub log: String,
}

const EXAMPLES: &str = "\
Examples:
  On this machine, for everybody on it:
    TOWER_FENCE_DATABASE_URL=postgres://localhost/shop tower-fence serve --migrate
    curl -X POST http://127.0.0.1:4120/locks/sku-1

  For other machines, with secrets and TLS:
    openssl rand -hex 32 > holders; openssl rand -hex 32 > operators; chmod 600 holders operators
    tower-fence serve --listen 0.0.0.0:4120 --database-url-file database-url \\
        --holder-secrets-file holders --operator-secrets-file operators \\
        --tls-cert-file server.pem --tls-key-file server.key

  With the leases in a Redis Cluster:
    tower-fence serve --redis-mode cluster --redis-url 'redis://a:6379, redis://b:6379'

  With the leases in etcd:
    tower-fence serve --etcd-url 'https://a:2379, https://b:2379, https://c:2379' --etcd-ca-file ca.pem";

#[derive(Args, Clone)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// A file with the secrets of holders, one per line.
    ///
    /// A holder sends `Authorization: Bearer SECRET`, and may take, renew, release and look at leases. Each secret
    /// has 16 characters at least; `openssl rand -hex 32` makes one. Several are known for a rotation. Or the variable
    /// TOWER_FENCE_HOLDER_SECRETS has them.
    #[arg(long, env = "TOWER_FENCE_HOLDER_SECRETS_FILE", value_name = "FILE")]
    pub holder_secrets_file: Option<PathBuf>,
    /// A file with the secrets of operators, one per line.
    ///
    /// An operator may do what holders do, and list all leases and end one by force. Or the variable
    /// TOWER_FENCE_OPERATOR_SECRETS has them. As soon as there is a secret of either kind, every request for leases
    /// needs one.
    #[arg(long, env = "TOWER_FENCE_OPERATOR_SECRETS_FILE", value_name = "FILE")]
    pub operator_secrets_file: Option<PathBuf>,
    /// Listens on other addresses than this machine's without any secret: whoever reaches the port may take, list
    /// and break leases.
    #[arg(long, env = "TOWER_FENCE_ALLOW_ANYONE", value_parser = BoolishValueParser::new())]
    pub allow_anyone: bool,
    /// The certificate and its chain (PEM). With it, the server speaks HTTPS only.
    #[arg(
        long,
        env = "TOWER_FENCE_TLS_CERT_FILE",
        value_name = "FILE",
        requires = "tls_key_file"
    )]
    pub tls_cert_file: Option<PathBuf>,
    /// The key of the certificate (PEM).
    #[arg(
        long,
        env = "TOWER_FENCE_TLS_KEY_FILE",
        value_name = "FILE",
        requires = "tls_cert_file"
    )]
    pub tls_key_file: Option<PathBuf>,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Leases")]
pub struct LeaseArgs {
    /// A file with keys that sign the tokens, `ID:SECRET` each; the first one signs.
    ///
    /// Then nobody can make a token up: a layer with these keys verifies it. Or the variable TOWER_FENCE_TOKEN_KEY has
    /// them.
    #[arg(long, env = "TOWER_FENCE_TOKEN_KEY_FILE", value_name = "FILE")]
    pub token_key_file: Option<PathBuf>,
    /// How long a lease lasts when the request does not say.
    #[arg(long, env = "TOWER_FENCE_TTL", value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub ttl: Duration,
    /// The shortest lease.
    #[arg(long, env = "TOWER_FENCE_MIN_TTL", value_name = "TIME", default_value = "100ms", value_parser = duration)]
    pub min_ttl: Duration,
    /// The longest lease.
    #[arg(long, env = "TOWER_FENCE_MAX_TTL", value_name = "TIME", default_value = "10m", value_parser = duration)]
    pub max_ttl: Duration,
    /// How long a request may wait in line.
    #[arg(long, env = "TOWER_FENCE_MAX_WAIT", value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub max_wait: Duration,
    /// Whether the fence in the database is raised to the token of a grant before the grant is answered, if the leases
    /// are in Redis or etcd.
    ///
    /// With it, a holder may base a write on what it reads under a fresh lease, if the fence is in the same database as
    /// the data. It costs a write in that database per grant.
    #[arg(long, env = "TOWER_FENCE_ANNOUNCE", value_name = "YES", default_value = "true",
          action = clap::ArgAction::Set, value_parser = BoolishValueParser::new())]
    pub announce: bool,
}

#[derive(Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// The most connections. Above it, a new one takes the place of one without a request: first of one that has sent
    /// nothing, then of one that is idle. While each has a request, new ones wait.
    #[arg(long, env = "TOWER_FENCE_MAX_CONNECTIONS", value_name = "NUMBER", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    pub max_connections: u32,
    /// The most requests under way, those to take a lease apart; others are answered 503.
    #[arg(long, env = "TOWER_FENCE_MAX_REQUESTS", value_name = "NUMBER", default_value_t = 5_000,
          value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    pub max_requests: u32,
    /// The most requests to take a lease that are under way, those that wait in the queue included; others are answered
    /// 503.
    #[arg(long, env = "TOWER_FENCE_MAX_WAITING", value_name = "NUMBER", default_value_t = 5_000,
          value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    pub max_waiting: u32,
    /// How many of these one caller may have. A caller is a secret, or an address if there are no secrets. Default: half
    /// of --max-waiting.
    #[arg(long, env = "TOWER_FENCE_MAX_WAITING_PER_CALLER", value_name = "NUMBER",
          value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    pub max_waiting_per_caller: Option<u32>,
    /// How long a client may take for its TLS handshake, for the head of a request, and to read an answer.
    #[arg(long, env = "TOWER_FENCE_CLIENT_TIMEOUT", value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub client_timeout: Duration,
    /// How long a connection stays open after its last request. Longer than a proxy in front keeps its connections: a
    /// request on a connection that was just closed fails.
    #[arg(long, env = "TOWER_FENCE_IDLE_TIMEOUT", value_name = "TIME", default_value = "75s", value_parser = duration)]
    pub idle_timeout: Duration,
    /// How long the server goes on to accept connections after a signal to stop, while /readyz says that it stops: as
    /// long as a load balancer takes to notice.
    #[arg(long, env = "TOWER_FENCE_DRAIN_DELAY", value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub drain_delay: Duration,
    /// How long requests under way may take after that. Those that wait in the queue are answered 503 within a second.
    #[arg(long, env = "TOWER_FENCE_DRAIN", value_name = "TIME", default_value = "20s", value_parser = duration)]
    pub drain: Duration,
}
