//! The options, secrets and certificates for leases in Redis.

use std::{error::Error, path::PathBuf, time::Duration};

use clap::{Args, ValueEnum, builder::BoolishValueParser};
use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo,
    RedisConnectionInfo, RedisResult, TlsCertificates, TlsMode,
    sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType},
};
use sqlx::Postgres;
use tower_fence::{
    Fence,
    lease::{RedisLeases, RedisLeasesBuilder},
};
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use crate::{
    certificates::{authorities, client_certificate},
    duration::positive,
    failure::{Failure, chain},
    secrets::{ESCAPES, Secret, addresses, is_ambiguous, or_default, split_urls},
};

/// The kind of servers that the Redis URLs name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RedisMode {
    /// A standalone server.
    Single,
    /// Sentinels, which report the address of the master.
    Sentinel,
    /// One or more nodes of a Redis Cluster.
    Cluster,
    /// All nodes of a quorum of independent servers, usually three or five.
    Quorum,
}

#[derive(Args)]
#[command(next_help_heading = "Redis (without Redis or etcd, the leases are in Postgres)")]
pub struct RedisArgs {
    /// The Redis servers with the leases: redis://host:6379, or rediss:// for TLS. Separate several
    /// URLs with blanks or commas.
    ///
    /// URLs with a password are accepted only in the variable TOWER_FENCE_REDIS_URL or in a file.
    /// In sentinel mode, the user, the password and TLS in these URLs apply to the sentinels.
    #[arg(long, value_name = "URLS")]
    pub redis_url: Option<String>,
    /// A file with these URLs.
    #[arg(long, env = "TOWER_FENCE_REDIS_URL_FILE", value_name = "FILE")]
    pub redis_url_file: Option<PathBuf>,
    /// The kind of servers that the URLs name.
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_MODE",
        value_name = "MODE",
        default_value = "single"
    )]
    pub redis_mode: RedisMode,
    /// The name under which the sentinels monitor the master.
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_MASTER",
        value_name = "NAME",
        default_value = DEFAULT_MASTER
    )]
    pub redis_master: String,
    /// The ACL user of the master that the sentinels report.
    #[arg(long, env = "TOWER_FENCE_REDIS_MASTER_USERNAME", value_name = "NAME")]
    pub redis_master_username: Option<String>,
    /// A file with the password of that master. The variable TOWER_FENCE_REDIS_MASTER_PASSWORD is
    /// an alternative.
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_MASTER_PASSWORD_FILE",
        value_name = "FILE"
    )]
    pub redis_master_password_file: Option<PathBuf>,
    /// The number of the database in that master. Default: 0.
    #[arg(long, env = "TOWER_FENCE_REDIS_MASTER_DATABASE", value_name = "NUMBER",
          value_parser = clap::value_parser!(i64).range(0..))]
    pub redis_master_database: Option<i64>,
    /// Connects to that master over TLS. Its certificate must be valid for the address that the
    /// sentinels report.
    #[arg(long, env = "TOWER_FENCE_REDIS_MASTER_TLS", value_parser = BoolishValueParser::new())]
    pub redis_master_tls: bool,
    /// The certificate authorities to trust (PEM), instead of those of the system.
    #[arg(long, env = "TOWER_FENCE_REDIS_CA_FILE", value_name = "FILE")]
    pub redis_ca_file: Option<PathBuf>,
    /// The client certificate for Redis and its chain (PEM).
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_CERT_FILE",
        value_name = "FILE",
        requires = "redis_key_file"
    )]
    pub redis_cert_file: Option<PathBuf>,
    /// The private key of that certificate (PEM).
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_KEY_FILE",
        value_name = "FILE",
        requires = "redis_cert_file"
    )]
    pub redis_key_file: Option<PathBuf>,
    /// The prefix of all key names, of the characters A-Z a-z 0-9 - _ and the dot. Each database
    /// needs a prefix of its own.
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_KEY_PREFIX",
        value_name = "TEXT",
        default_value = DEFAULT_PREFIX
    )]
    pub redis_key_prefix: String,
    /// The timeout for the answer of one node of a quorum. It must be several times the round-trip
    /// time to the farthest node.
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_NODE_TIMEOUT",
        value_name = "TIME",
        default_value = "50ms",
        value_parser = positive
    )]
    pub redis_node_timeout: Duration,
}

/// Reason for the refusal of certificates without effect.
const CERTIFICATES: &str = "certificates require TLS: use rediss:// URLs";
const DEFAULT_MASTER: &str = "mymaster";
const DEFAULT_PREFIX: &str = "tower-fence";
const DEFAULT_NODE_TIMEOUT: Duration = Duration::from_millis(50);
/// The variable with the password of the master.
const PASSWORD: &str = "TOWER_FENCE_REDIS_MASTER_PASSWORD";

impl RedisArgs {
    /// Returns the URLs; `None` if the leases are not in Redis.
    pub fn urls(&self) -> Result<Option<Secret>, Failure> {
        let (option, file) = (self.redis_url.as_deref(), self.redis_url_file.as_deref());
        let urls = Secret::find_urls("TOWER_FENCE_REDIS_URL", option, file)?;
        if let Some(found) = &urls {
            // The URL is not shown. Otherwise, a part of the password could be logged as the port.
            if split_urls(found.expose()).any(is_ambiguous) {
                return Err(Failure::configuration(format!(
                    "invalid Redis URL: {ESCAPES}"
                )));
            }
            return Ok(urls);
        }
        let is_configured = self.redis_mode != RedisMode::Single
            || self.master() != DEFAULT_MASTER
            || self.has_master()?
            || self.redis_ca_file.is_some()
            || self.redis_cert_file.is_some()
            || self.key_prefix() != DEFAULT_PREFIX
            || self.redis_node_timeout != DEFAULT_NODE_TIMEOUT;
        match is_configured {
            true => Err(Failure::configuration(
                "Redis is configured without its URL: set TOWER_FENCE_REDIS_URL",
            )),
            false => Ok(None),
        }
    }

    /// Returns the name of the master. A blank setting counts as missing.
    fn master(&self) -> &str {
        or_default(&self.redis_master, DEFAULT_MASTER)
    }

    /// Returns the prefix of all key names. A blank setting counts as missing.
    fn key_prefix(&self) -> &str {
        or_default(&self.redis_key_prefix, DEFAULT_PREFIX)
    }

    /// Returns the location of the leases for messages.
    pub fn place(&self, urls: &[&str]) -> String {
        let infos = urls.iter().flat_map(|url| url.into_connection_info());
        let mut databases: Vec<_> = match self.redis_mode {
            RedisMode::Single | RedisMode::Quorum => {
                infos.map(|info| info.redis_settings().db()).collect()
            }
            RedisMode::Sentinel | RedisMode::Cluster => {
                vec![self.redis_master_database.unwrap_or(0)]
            }
        };
        databases.dedup();
        let databases: Vec<_> = databases.iter().map(ToString::to_string).collect();
        let mode = format!("{:?}", self.redis_mode).to_lowercase();
        format!(
            "redis ({mode}) at {}, database {}, prefix {}",
            addresses(urls.iter().copied()),
            databases.join(" and "),
            self.key_prefix()
        )
    }

    /// Creates the store without connecting to Redis, for every mode except quorum.
    pub fn connect_lazy(
        &self,
        builder: RedisLeasesBuilder,
        urls: &[&str],
    ) -> Result<RedisLeases, Failure> {
        let builder = builder.key_prefix(self.key_prefix());
        let certificates = self.certificates()?;
        let leases = match (self.redis_mode, urls) {
            (RedisMode::Sentinel, _) => {
                let sentinels = connection_infos(urls)?;
                let client = self.sentinels(&sentinels, certificates)?;
                let database = self.redis_master_database.unwrap_or(0);
                let addresses = sentinels.iter().map(|info| info.addr().to_string());
                let addresses = addresses.collect::<Vec<_>>().join(", ");
                let address = format!("the master {} of the sentinels {addresses}", self.master());
                builder.with_sentinels(client, database, &address)
            }
            (RedisMode::Cluster, _) => {
                if certificates.is_some() && !connection_infos(urls)?.iter().all(has_tls) {
                    return Err(invalid(CERTIFICATES));
                }
                builder.with_cluster(urls, move |client| match &certificates {
                    Some(certificates) => client.certs(certificates.clone()),
                    None => client,
                })
            }
            (_, [url]) => builder.with_client(open(url, certificates).map_err(refused)?),
            _ => {
                return Err(Failure::configuration(
                    "several Redis URLs are given: set TOWER_FENCE_REDIS_MODE to sentinel, cluster or quorum",
                ));
            }
        };
        leases.map_err(refused)
    }

    /// Returns the client of the sentinels and of their master. Certificates apply to the
    /// connections that use TLS.
    fn sentinels(
        &self,
        sentinels: &[ConnectionInfo],
        certificates: Option<TlsCertificates>,
    ) -> Result<SentinelClient, Failure> {
        let own = credentials(sentinels)?;
        let password = self.master_password()?;
        // Without a password, the client would not send the user either.
        if self.redis_master_username.is_some() && password.is_none() {
            return Err(invalid(
                "the user of the master requires a password: set TOWER_FENCE_REDIS_MASTER_PASSWORD",
            ));
        }
        let all_tls = sentinels.iter().all(has_tls);
        if !all_tls && sentinels.iter().any(has_tls) {
            return Err(invalid("either all sentinels must use TLS, or none"));
        }
        if certificates.is_some() && !all_tls && !self.redis_master_tls {
            return Err(invalid(CERTIFICATES));
        }
        let addresses = sentinels.iter().map(|sentinel| sentinel.addr().clone());
        let master = SentinelServerType::Master;
        let client = SentinelClientBuilder::new(addresses, self.master(), master);
        let mut client = client
            .map_err(refused)?
            .set_client_to_sentinel_protocol(own.protocol())
            .set_client_to_redis_db(self.redis_master_database.unwrap_or(0));
        if let Some(username) = own.username() {
            client = client.set_client_to_sentinel_username(username);
        }
        if let Some(password) = own.password() {
            client = client.set_client_to_sentinel_password(password);
        }
        if let Some(username) = &self.redis_master_username {
            client = client.set_client_to_redis_username(username);
        }
        if let Some(password) = &password {
            client = client.set_client_to_redis_password(password.expose());
        }
        if self.redis_master_tls {
            client = client.set_client_to_redis_tls_mode(TlsMode::Secure);
        }
        if let Some(certificates) = certificates {
            if all_tls {
                client = client.set_client_to_sentinel_certificates(certificates.clone());
            }
            if self.redis_master_tls {
                client = client.set_client_to_redis_certificates(certificates);
            }
        }
        client.build().map_err(refused)
    }

    /// Creates the store over a quorum of servers, without connecting to them.
    pub fn quorum(&self, epochs: Fence<Postgres>, urls: &[&str]) -> Result<QuorumLeases, Failure> {
        let builder = QuorumLeasesBuilder::new(epochs)
            .key_prefix(self.key_prefix())
            .node_timeout(self.redis_node_timeout);
        let Some(certificates) = self.certificates()? else {
            return builder.connect_lazy(urls).map_err(refused);
        };
        let clients = urls.iter().zip(1..).map(|(url, number)| {
            // The error is not shown, because it may quote a part of the URL.
            open(url, Some(certificates.clone())).map_err(|_| {
                invalid(&format!(
                    "node {number} of {} has an invalid URL, or one without TLS",
                    urls.len()
                ))
            })
        });
        let clients = clients.collect::<Result<_, Failure>>()?;
        builder.with_clients(clients).map_err(refused)
    }

    /// Creates a client of the server at one of the URLs.
    pub fn client(&self, url: &str) -> Result<Client, Failure> {
        // In sentinel mode, the certificates may be only for the master.
        let is_secure = url.into_connection_info().is_ok_and(|info| has_tls(&info));
        open(url, self.certificates()?.filter(|_| is_secure)).map_err(refused)
    }

    /// Refuses settings that have no effect in this mode.
    pub fn refuse_settings_without_effect(&self) -> Result<(), Failure> {
        if self.has_master()? && self.redis_mode != RedisMode::Sentinel {
            return Err(Failure::configuration(
                "the settings TOWER_FENCE_REDIS_MASTER_... are only for sentinel mode: \
                 put the user, the password and the database of a Redis server into its URL",
            ));
        }
        if self.redis_node_timeout != DEFAULT_NODE_TIMEOUT && self.redis_mode != RedisMode::Quorum {
            return Err(Failure::configuration(
                "the setting TOWER_FENCE_REDIS_NODE_TIMEOUT is only for quorum mode",
            ));
        }
        Ok(())
    }

    /// Returns whether a setting for the monitored master is given.
    fn has_master(&self) -> Result<bool, Failure> {
        Ok(self.redis_master_username.is_some()
            || self.master_password()?.is_some()
            || self.redis_master_database.is_some()
            || self.redis_master_tls)
    }

    fn master_password(&self) -> Result<Option<Secret>, Failure> {
        Secret::find(PASSWORD, self.redis_master_password_file.as_deref())
    }

    /// Reads the certificate authorities and the client certificate, if any are configured.
    fn certificates(&self) -> Result<Option<TlsCertificates>, Failure> {
        let trusted = self.redis_ca_file.as_deref().map(authorities).transpose()?;
        let (cert, key) = (&self.redis_cert_file, &self.redis_key_file);
        let client = client_certificate(cert.as_deref(), key.as_deref())?;
        let is_configured = trusted.is_some() || client.is_some();
        Ok(is_configured.then(|| TlsCertificates {
            root_cert: trusted,
            client_tls: client.map(|(client_cert, key)| ClientTlsConfig {
                client_cert,
                client_key: key.expose().into(),
            }),
        }))
    }
}

/// Creates a client of one server. Refuses certificates for a URL without TLS.
fn open(url: &str, certificates: Option<TlsCertificates>) -> RedisResult<Client> {
    match certificates {
        Some(certificates) => Client::build_with_tls(url, certificates),
        None => Client::open(url),
    }
}

fn connection_infos(urls: &[&str]) -> Result<Vec<ConnectionInfo>, Failure> {
    let infos = urls.iter().map(|url| url.into_connection_info());
    let infos = infos.collect::<RedisResult<_>>();
    infos.map_err(refused)
}

/// Returns the user and the password of the sentinels, which must be the same for all of them.
fn credentials(sentinels: &[ConnectionInfo]) -> Result<&RedisConnectionInfo, Failure> {
    let Some(own) = sentinels.first().map(ConnectionInfo::redis_settings) else {
        return Err(invalid("the list of sentinels is empty"));
    };
    for sentinel in sentinels.iter().map(ConnectionInfo::redis_settings) {
        if (sentinel.username(), sentinel.password()) != (own.username(), own.password()) {
            return Err(invalid(
                "all sentinels must have the same user and password",
            ));
        }
        if sentinel.db() != 0 {
            return Err(invalid(
                "a sentinel URL must not contain a database: set TOWER_FENCE_REDIS_MASTER_DATABASE for the master",
            ));
        }
    }
    Ok(own)
}

fn has_tls(server: &ConnectionInfo) -> bool {
    matches!(server.addr(), ConnectionAddr::TcpTls { .. })
}

fn invalid(reason: &str) -> Failure {
    Failure::configuration(format!("invalid Redis settings: {reason}"))
}

fn refused(error: impl Error + 'static) -> Failure {
    invalid(&chain(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentinels_that_differ_are_refused_without_their_secrets() {
        for urls in [
            &["redis://:hunter2@a", "redis://:hunter3@b"][..],
            &["redis://:hunter2@a", "redis://b"],
            &["redis://me:hunter2@a", "redis://you:hunter2@b"],
            &["redis://:hunter2@a/3"],
            &[],
        ] {
            let refused = credentials(&connection_infos(urls).unwrap()).unwrap_err();
            assert!(!refused.text.contains("hunter"), "{refused:?}");
        }
        let equal = connection_infos(&["redis://me:hunter2@a", "redis://me:hunter2@b"]).unwrap();
        assert_eq!(credentials(&equal).unwrap().username(), Some("me"));
    }
}
