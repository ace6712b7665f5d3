//! The options, secrets and certificates for leases in Redis.

use std::path::PathBuf;

use clap::{Args, ValueEnum, builder::BoolishValueParser};
use redis::{Client, ClientTlsConfig, TlsCertificates};
use sqlx::Postgres;
use tower_fence::{
    Fence,
    lease::{LeaseError, RedisLeases, RedisLeasesBuilder},
};
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use super::certificates::Certificates;
use crate::{
    failure::{Failure, chain},
    secrets::{ESCAPES, Secret, is_ambiguous, or_default, words},
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
#[command(next_help_heading = "Redis (without Redis and etcd, the leases are in Postgres)")]
pub struct RedisArgs {
    /// The Redis servers with the leases: redis://host:6379, or rediss:// for TLS. Separate several
    /// URLs with blanks or commas.
    ///
    /// URLs with a password are accepted only in the variable TOWER_FENCE_REDIS_URL or in a file.
    /// In the mode sentinel, the user, the password and TLS in these URLs apply to the sentinels.
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
    /// The prefix of all key names. Each database needs a prefix of its own.
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_KEY_PREFIX",
        value_name = "TEXT",
        default_value = DEFAULT_PREFIX
    )]
    pub redis_key_prefix: String,
}

const DEFAULT_MASTER: &str = "mymaster";
const DEFAULT_PREFIX: &str = "tower-fence";
/// The variable with the password of the master.
const PASSWORD: &str = "TOWER_FENCE_REDIS_MASTER_PASSWORD";

impl RedisArgs {
    /// Returns the URLs; `None` if the leases are not in Redis.
    pub fn urls(&self) -> Result<Option<Secret>, Failure> {
        let (option, file) = (self.redis_url.as_deref(), self.redis_url_file.as_ref());
        let urls = Secret::find_urls("TOWER_FENCE_REDIS_URL", option, file)?;
        if let Some(found) = &urls {
            // The URL is not shown. Otherwise, a part of the password could be logged as the port.
            if words(found.expose()).any(is_ambiguous) {
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
            || self.key_prefix() != DEFAULT_PREFIX;
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

    /// Creates the store without connecting to Redis, for every mode except quorum.
    pub fn connect_lazy(
        &self,
        builder: RedisLeasesBuilder,
        urls: &[&str],
    ) -> Result<RedisLeases, Failure> {
        let mut builder = builder.key_prefix(self.key_prefix());
        let certificates = self.certificates()?;
        if let Some(authority) = certificates.authority {
            builder = builder.certificate_authority(authority);
        }
        if let Some((pem, key)) = certificates.client {
            builder = builder.client_certificate(pem, key.expose());
        }
        let leases = match (self.redis_mode, urls) {
            (RedisMode::Sentinel, _) => {
                let master = self.with_master(builder)?;
                master.connect_sentinels_lazy(urls, self.master())
            }
            (RedisMode::Cluster, _) => builder.connect_cluster_lazy(urls),
            (_, [url]) => builder.connect_lazy(url),
            _ => {
                return Err(Failure::configuration(
                    "several Redis URLs are given: set TOWER_FENCE_REDIS_MODE to sentinel, cluster or quorum",
                ));
            }
        };
        leases.map_err(refused)
    }

    /// Creates the store over a quorum of servers, without connecting to them.
    pub fn quorum(&self, epochs: Fence<Postgres>, urls: &[&str]) -> Result<QuorumLeases, Failure> {
        let builder = QuorumLeasesBuilder::new(epochs).key_prefix(self.key_prefix());
        let Certificates { authority, client } = self.certificates()?;
        if authority.is_none() && client.is_none() {
            return builder.connect_lazy(urls).map_err(refused);
        }
        let certificates = TlsCertificates {
            root_cert: authority,
            client_tls: client.map(|(client_cert, key)| ClientTlsConfig {
                client_cert,
                client_key: key.expose().into(),
            }),
        };
        let clients = urls.iter().zip(1..).map(|(url, place)| {
            // The error is not shown, because it may quote a part of the URL.
            Client::build_with_tls(*url, certificates.clone()).map_err(|_| {
                Failure::configuration(format!(
                    "invalid Redis settings: node {place} of {} has an invalid URL, or one without TLS",
                    urls.len()
                ))
            })
        });
        let clients = clients.collect::<Result<_, Failure>>()?;
        builder.with_clients(clients).map_err(refused)
    }

    /// Creates a client of the server at one of the URLs.
    pub fn client(&self, url: &str) -> Result<Client, Failure> {
        let Certificates { authority, client } = self.certificates()?;
        let opened = if url.starts_with("rediss://") && (authority.is_some() || client.is_some()) {
            let certificates = TlsCertificates {
                client_tls: client.map(|(client_cert, key)| ClientTlsConfig {
                    client_cert,
                    client_key: key.expose().into(),
                }),
                root_cert: authority,
            };
            Client::build_with_tls(url, certificates)
        } else {
            Client::open(url)
        };
        opened.map_err(|error| Failure::configuration(format!("invalid Redis settings: {error}")))
    }

    /// Refuses settings that would have no effect.
    pub fn check(&self) -> Result<(), Failure> {
        if self.has_master()? && self.redis_mode != RedisMode::Sentinel {
            return Err(Failure::configuration(
                "the settings TOWER_FENCE_REDIS_MASTER_... are only for the mode sentinel: \
                 put the user, the password and the database of a Redis server into its URL",
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

    fn with_master(&self, mut builder: RedisLeasesBuilder) -> Result<RedisLeasesBuilder, Failure> {
        if let Some(username) = &self.redis_master_username {
            builder = builder.master_username(username);
        }
        if let Some(password) = self.master_password()? {
            builder = builder.master_password(password.expose());
        }
        Ok(builder
            .master_database(self.redis_master_database.unwrap_or(0))
            .master_tls(self.redis_master_tls))
    }

    fn master_password(&self) -> Result<Option<Secret>, Failure> {
        Secret::find(PASSWORD, self.redis_master_password_file.as_deref())
    }

    fn certificates(&self) -> Result<Certificates, Failure> {
        Certificates::read(
            self.redis_ca_file.as_deref(),
            self.redis_cert_file.as_deref(),
            self.redis_key_file.as_deref(),
        )
    }
}

pub fn refused(error: LeaseError) -> Failure {
    Failure::configuration(format!("invalid Redis settings: {}", chain(&error)))
}
