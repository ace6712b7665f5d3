//! The options of `serve`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, builder::BoolishValueParser};

use super::{etcd::EtcdArgs, redis::RedisArgs};
use crate::{
    database::{DatabaseArgs, FirstMigrationArgs},
    duration::{duration, positive},
    logs::Format,
};

/// Grants leases over HTTP.
///
/// Each option has an environment variable: --max-wait has TOWER_FENCE_MAX_WAIT. TERM and INT stop
/// the server gracefully, and a second signal stops it immediately. At HUP, the server reloads the
/// files with the secrets of clients, the token keys and its certificate, but no credentials for
/// stores.
///
/// The leases are under /locks, and /locks/openapi.json describes the API. The console for
/// operators is at /console. /healthz, /readyz and /metrics (Prometheus) never require a secret.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct ServeArgs {
    /// A TOML file with settings. Each setting has the name of its option: `listen =
    /// "127.0.0.1:4120"`.
    ///
    /// An option on the command line or in the environment overrides the setting. The file must not
    /// contain secrets, but may name files that contain them.
    #[arg(long, env = "TOWER_FENCE_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The address and the port to listen on. Port 0 selects a free port.
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
    /// The maximum number of connections in the pool. The server also opens one connection to
    /// listen for notifications. At startup, and while /readyz finds the pool busy, it opens up to
    /// two others.
    #[arg(long, env = "TOWER_FENCE_DATABASE_CONNECTIONS", value_name = "NUMBER", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub database_connections: u32,
    /// Creates or updates the tables before the server starts, like `tower-fence migrate`.
    #[arg(long, env = "TOWER_FENCE_MIGRATE", value_parser = BoolishValueParser::new())]
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
    /// The format of the log, which is written to standard error.
    #[arg(
        long,
        env = "TOWER_FENCE_LOG_FORMAT",
        value_name = "FORMAT",
        default_value = "plain",
        help_heading = "Log"
    )]
    pub log_format: Format,
    /// The lowest level that is logged: error, warn, info, debug or trace. A level may also be set
    /// for a module of the program.
    #[arg(
        long,
        env = "TOWER_FENCE_LOG",
        value_name = "FILTER",
        default_value = "info,sqlx=warn,redis=off",
        help_heading = "Log"
    )]
    pub log: String,
}

const EXAMPLES: &str = "\
Examples:
  For clients on this machine, without secrets:
    TOWER_FENCE_DATABASE_URL=postgres://localhost/shop tower-fence serve --migrate
    curl -X POST http://127.0.0.1:4120/locks/sku-1

  For clients on other machines, with secrets and TLS:
    (umask 077; openssl rand -hex 32 > holders; openssl rand -hex 32 > operators)
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
    /// A holder sends `Authorization: Bearer SECRET`, and may acquire, renew, release and inspect
    /// leases. Each secret has at least 16 characters; `openssl rand -hex 32` generates one. To
    /// rotate a secret, list the old and the new one. The variable TOWER_FENCE_HOLDER_SECRETS is an
    /// alternative to the file.
    #[arg(long, env = "TOWER_FENCE_HOLDER_SECRETS_FILE", value_name = "FILE")]
    pub holder_secrets_file: Option<PathBuf>,
    /// A file with the secrets of operators, one per line.
    ///
    /// An operator has the rights of a holder, and may also list all leases and break a lease. The
    /// variable TOWER_FENCE_OPERATOR_SECRETS is an alternative to the file. If any secret is
    /// configured, of holders or of operators, every request for leases needs one.
    #[arg(long, env = "TOWER_FENCE_OPERATOR_SECRETS_FILE", value_name = "FILE")]
    pub operator_secrets_file: Option<PathBuf>,
    /// Permits addresses that other machines can reach even if no secret is configured. Any client
    /// that can connect to the port may then acquire, list and break leases.
    #[arg(long, env = "TOWER_FENCE_ALLOW_ANYONE", value_parser = BoolishValueParser::new())]
    pub allow_anyone: bool,
    /// The certificate and its chain (PEM). With it, the server accepts only HTTPS.
    #[arg(
        long,
        env = "TOWER_FENCE_TLS_CERT_FILE",
        value_name = "FILE",
        requires = "tls_key_file"
    )]
    pub tls_cert_file: Option<PathBuf>,
    /// The private key of the certificate (PEM).
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
    /// A file with the keys of signed tokens, each as `ID:SECRET`. The first key signs.
    ///
    /// A layer with these keys verifies each token, so that clients cannot forge tokens. The
    /// variable TOWER_FENCE_TOKEN_KEY is an alternative to the file.
    #[arg(long, env = "TOWER_FENCE_TOKEN_KEY_FILE", value_name = "FILE")]
    pub token_key_file: Option<PathBuf>,
    /// The duration of a lease if the request does not specify one.
    #[arg(long, env = "TOWER_FENCE_TTL", value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub ttl: Duration,
    /// The minimum duration of a lease.
    #[arg(long, env = "TOWER_FENCE_MIN_TTL", value_name = "TIME", default_value = "100ms", value_parser = duration)]
    pub min_ttl: Duration,
    /// The maximum duration of a lease.
    #[arg(long, env = "TOWER_FENCE_MAX_TTL", value_name = "TIME", default_value = "10m", value_parser = duration)]
    pub max_ttl: Duration,
    /// The maximum time that a request may wait in the queue.
    #[arg(long, env = "TOWER_FENCE_MAX_WAIT", value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub max_wait: Duration,
    /// Whether to raise the fence in the database to the token of each grant before the grant is
    /// returned. Applies if the leases are in Redis or etcd.
    ///
    /// With this setting, a holder may base a write on data that it reads under a new lease, if the
    /// fence and the data are in the same database. Each grant costs one write in that database.
    /// All servers with the same key prefix must have the same value.
    #[arg(long, env = "TOWER_FENCE_ANNOUNCE", value_name = "YES", default_value = "true",
          action = clap::ArgAction::Set, value_parser = BoolishValueParser::new())]
    pub announce: bool,
}

#[derive(Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// The maximum number of connections. If it is reached, the server closes a connection for each
    /// new connection. It first closes connections that have sent nothing for a second, then those
    /// that are slow to send a request, then idle ones, then those whose client does not read its
    /// response, and last those that were opened within the last second. While every other
    /// connection has a request, new connections wait.
    #[arg(long, env = "TOWER_FENCE_MAX_CONNECTIONS", value_name = "NUMBER", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    pub max_connections: u32,
    /// The maximum number of concurrent requests, not counting those that acquire a lease. Further
    /// requests are answered with 503. One caller may have at most half of them.
    #[arg(long, env = "TOWER_FENCE_MAX_REQUESTS", value_name = "NUMBER", default_value_t = 5_000,
          value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    pub max_requests: u32,
    /// The maximum number of concurrent requests that acquire a lease, including those that wait in
    /// the queue; at most half of the connections. Further requests are answered with 503.
    #[arg(long, env = "TOWER_FENCE_MAX_WAITING", value_name = "NUMBER", default_value_t = 5_000,
          value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    pub max_waiting: u32,
    /// The maximum number of concurrent requests of one caller that acquire a lease. A caller is
    /// identified by its secret or, if no secrets are configured, by its address. Default: half of
    /// --max-waiting, or a quarter of the connections if that is less.
    #[arg(long, env = "TOWER_FENCE_MAX_WAITING_PER_CALLER", value_name = "NUMBER",
          value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    pub max_waiting_per_caller: Option<u32>,
    /// How long a client may take for each of these steps: the TLS handshake, sending the head of a
    /// request, and reading a response.
    #[arg(long, env = "TOWER_FENCE_CLIENT_TIMEOUT", value_name = "TIME", default_value = "30s", value_parser = positive)]
    pub client_timeout: Duration,
    /// How long a connection stays open after its last request. Set it to more than the idle
    /// timeout of a proxy in front of the server. Otherwise the proxy may send a request on a
    /// connection that the server has just closed, and the request fails.
    #[arg(long, env = "TOWER_FENCE_IDLE_TIMEOUT", value_name = "TIME", default_value = "75s", value_parser = positive)]
    pub idle_timeout: Duration,
    /// How long the server continues to accept connections after a signal to stop, while /readyz
    /// reports that it is stopping. Set it to the time that a load balancer needs to detect this.
    #[arg(long, env = "TOWER_FENCE_DRAIN_DELAY", value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub drain_delay: Duration,
    /// How long requests in progress may take after --drain-delay. Requests that wait in the queue
    /// are answered with 503 within a second.
    #[arg(long, env = "TOWER_FENCE_DRAIN", value_name = "TIME", default_value = "20s", value_parser = duration)]
    pub drain: Duration,
}
