//! The Redis with the leases: its options, its secrets and its certificates.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum, builder::BoolishValueParser};
use redis::{Client, ClientTlsConfig, TlsCertificates};
use rustls::{
    crypto::ring::sign::any_supported_type,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use sqlx::Postgres;
use tower_fence::{
    Fence,
    lease::{LeaseError, RedisLeases, RedisLeasesBuilder},
};
use tower_fence_redlock::{QuorumLeases, QuorumLeasesBuilder};

use crate::{
    failure::{Failure, chain},
    secrets::Secret,
};

/// What the URLs of Redis lead to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RedisMode {
    /// One server that stands alone.
    Single,
    /// Sentinels, which name the master.
    Sentinel,
    /// Some nodes of a Redis Cluster.
    Cluster,
    /// All nodes of a quorum: three or five servers that know nothing of each other.
    Quorum,
}

#[derive(Args)]
#[command(next_help_heading = "Redis (without it, the leases are in the Postgres)")]
pub struct RedisArgs {
    /// The Redis with the leases: redis://host:6379, or rediss:// for TLS; several with blanks or commas between.
    ///
    /// With a password they belong into the variable TOWER_FENCE_REDIS_URL, or into a file. Of sentinels, user, password
    /// and TLS in these URLs are those of the sentinels.
    #[arg(long, value_name = "URLS")]
    pub redis_url: Option<String>,
    /// A file with these URLs.
    #[arg(long, env = "TOWER_FENCE_REDIS_URL_FILE", value_name = "FILE")]
    pub redis_url_file: Option<PathBuf>,
    /// What the URLs lead to.
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_MODE",
        value_name = "MODE",
        default_value = "single"
    )]
    pub redis_mode: RedisMode,
    /// The name of the master, as the sentinels know it.
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_MASTER",
        value_name = "NAME",
        default_value = "mymaster"
    )]
    pub redis_master: String,
    /// The ACL user of the master that sentinels name.
    #[arg(long, env = "TOWER_FENCE_REDIS_MASTER_USERNAME", value_name = "NAME")]
    pub redis_master_username: Option<String>,
    /// A file with the password of that master. Or the variable TOWER_FENCE_REDIS_MASTER_PASSWORD has it.
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
    /// Reaches that master over TLS. Its certificate is for the address that the sentinels report.
    #[arg(long, env = "TOWER_FENCE_REDIS_MASTER_TLS", value_parser = BoolishValueParser::new())]
    pub redis_master_tls: bool,
    /// The authorities that are trusted over TLS (PEM), instead of those of the system.
    #[arg(long, env = "TOWER_FENCE_REDIS_CA_FILE", value_name = "FILE")]
    pub redis_ca_file: Option<PathBuf>,
    /// The certificate that is shown to Redis over TLS, and its chain (PEM).
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_CERT_FILE",
        value_name = "FILE",
        requires = "redis_key_file"
    )]
    pub redis_cert_file: Option<PathBuf>,
    /// The key of that certificate (PEM).
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_KEY_FILE",
        value_name = "FILE",
        requires = "redis_cert_file"
    )]
    pub redis_key_file: Option<PathBuf>,
    /// What the names of all keys begin with. Servers with another database need another prefix.
    #[arg(
        long,
        env = "TOWER_FENCE_REDIS_KEY_PREFIX",
        value_name = "TEXT",
        default_value = "tower-fence"
    )]
    pub redis_key_prefix: String,
    /// Whether a grant makes every older token dead in the database before it is answered.
    ///
    /// With it, what a holder reads under a fresh lease is safe to base a write on, where the fence is in the same
    /// database as what is written. It costs a write there per grant.
    #[arg(long, env = "TOWER_FENCE_ANNOUNCE", value_name = "YES", default_value = "true",
          action = clap::ArgAction::Set, value_parser = BoolishValueParser::new())]
    pub announce: bool,
}

/// The variable with the password of the master.
const PASSWORD: &str = "TOWER_FENCE_REDIS_MASTER_PASSWORD";

/// What is shown and trusted over TLS, as it is in the files.
#[derive(Default)]
struct Certificates {
    authority: Option<Vec<u8>>,
    client: Option<(Vec<u8>, Secret)>,
}

impl RedisArgs {
    /// A Redis that is not a quorum.
    pub fn connect_lazy(
        &self,
        builder: RedisLeasesBuilder,
        urls: &[&str],
    ) -> Result<RedisLeases, Failure> {
        let mut builder = builder.key_prefix(&self.redis_key_prefix);
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
                master.connect_sentinels_lazy(urls, &self.redis_master)
            }
            (RedisMode::Cluster, _) => builder.connect_cluster_lazy(urls),
            (_, [url]) => builder.connect_lazy(url),
            _ => {
                return Err(Failure::configuration(
                    "several URLs of Redis are given: say in TOWER_FENCE_REDIS_MODE what they lead to, \
                     sentinel, cluster or quorum",
                ));
            }
        };
        leases.map_err(refused)
    }

    /// A quorum of servers.
    pub fn quorum(&self, epochs: Fence<Postgres>, urls: &[&str]) -> Result<QuorumLeases, Failure> {
        let builder = QuorumLeasesBuilder::new(epochs).key_prefix(&self.redis_key_prefix);
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
            // The error may quote a part of the URL.
            Client::build_with_tls(*url, certificates.clone()).map_err(|_| {
                Failure::configuration(format!(
                    "no Redis: node {place} of {} has an invalid URL, or one without TLS",
                    urls.len()
                ))
            })
        });
        let clients = clients.collect::<Result<_, Failure>>()?;
        builder.with_clients(clients).map_err(refused)
    }

    /// A client of the server that one of the URLs names.
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
        opened.map_err(|error| Failure::configuration(format!("no Redis: {error}")))
    }

    /// Refuses settings that would have no effect.
    pub fn check(&self) -> Result<(), Failure> {
        let has_master = self.redis_master_username.is_some()
            || self.master_password()?.is_some()
            || self.redis_master_database.is_some()
            || self.redis_master_tls;
        if has_master && self.redis_mode != RedisMode::Sentinel {
            return Err(Failure::configuration(
                "the settings TOWER_FENCE_REDIS_MASTER_... are for the mode sentinel: \
                 put the user, the password and the database of a Redis in its URL",
            ));
        }
        Ok(())
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
        let authority = match &self.redis_ca_file {
            Some(path) => Some(read(path)?.0),
            None => None,
        };
        let client = match (&self.redis_cert_file, &self.redis_key_file) {
            (Some(cert), Some(key)) => Some(client(cert, key)?),
            _ => None,
        };
        Ok(Certificates { authority, client })
    }
}

/// A certificate, and the key that belongs to it.
fn client(cert: &Path, key: &Path) -> Result<(Vec<u8>, Secret), Failure> {
    let failed = |path, error: &str| Failure::file("cannot use", path, error);
    let (pem, chain_of) = read(cert)?;
    let text = Secret::from_file(key)?;
    // What is wrong with a key is not shown.
    let private = PrivateKeyDer::from_pem_slice(text.expose().as_bytes())
        .map_err(|_| failed(key, "there is no private key in it (PEM)"))?;
    let private = any_supported_type(&private)
        .map_err(|_| failed(key, "the private key is of no supported type"))?;
    CertifiedKey::new(chain_of, private)
        .keys_match()
        .map_err(|error| failed(cert, &format!("with its key: {}", chain(&error))))?;
    Ok((pem, text))
}

/// A file with certificates, one at least.
fn read(path: &Path) -> Result<(Vec<u8>, Vec<CertificateDer<'static>>), Failure> {
    let pem = fs::read(path).map_err(|error| Failure::file("cannot read", path, error))?;
    let found = CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|error| Failure::file("cannot use", path, chain(&error)))?;
    match found.is_empty() {
        true => Err(Failure::file(
            "cannot use",
            path,
            "there is no certificate in it",
        )),
        false => Ok((pem, found)),
    }
}

pub fn refused(error: LeaseError) -> Failure {
    Failure::configuration(format!("no Redis: {}", chain(&error)))
}
