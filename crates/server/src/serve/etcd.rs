//! The options, password and certificates for leases in etcd.

use std::{error::Error, path::PathBuf, time::Duration};

use clap::Args;
use reqwest::{Client, Identity, redirect::Policy};
use sqlx::Postgres;
use tower_fence::Fence;
use tower_fence_etcd::{EtcdLeases, EtcdLeasesBuilder};
use zeroize::Zeroizing;

use crate::{
    certificates::{client_certificate, trust_only},
    failure::{Failure, chain},
    secrets::{Secret, has_password, has_scheme, or_default, split_urls},
};

const DEFAULT_PREFIX: &str = "tower-fence";
/// The variable with the password.
const PASSWORD: &str = "TOWER_FENCE_ETCD_PASSWORD";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Args)]
#[command(next_help_heading = "etcd (instead of Redis)")]
pub struct EtcdArgs {
    /// The members of the etcd cluster with the leases: http://host:2379, or https:// for TLS.
    /// Separate several URLs with blanks or commas.
    #[arg(long, env = "TOWER_FENCE_ETCD_URL", value_name = "URLS")]
    pub etcd_url: Option<String>,
    /// The user of etcd. It needs read and write permission for the keys that begin with the
    /// prefix.
    #[arg(long, env = "TOWER_FENCE_ETCD_USERNAME", value_name = "NAME")]
    pub etcd_username: Option<String>,
    /// A file with the password of that user. The variable TOWER_FENCE_ETCD_PASSWORD is an
    /// alternative.
    #[arg(long, env = "TOWER_FENCE_ETCD_PASSWORD_FILE", value_name = "FILE")]
    pub etcd_password_file: Option<PathBuf>,
    /// The certificate authorities to trust (PEM), instead of those of the system.
    #[arg(long, env = "TOWER_FENCE_ETCD_CA_FILE", value_name = "FILE")]
    pub etcd_ca_file: Option<PathBuf>,
    /// The client certificate for etcd and its chain (PEM). If etcd has authentication enabled, it
    /// refuses a certificate with a common name (CN).
    #[arg(
        long,
        env = "TOWER_FENCE_ETCD_CERT_FILE",
        value_name = "FILE",
        requires = "etcd_key_file"
    )]
    pub etcd_cert_file: Option<PathBuf>,
    /// The private key of that certificate (PEM).
    #[arg(
        long,
        env = "TOWER_FENCE_ETCD_KEY_FILE",
        value_name = "FILE",
        requires = "etcd_cert_file"
    )]
    pub etcd_key_file: Option<PathBuf>,
    /// The prefix of all key names, of the characters A-Z a-z 0-9 - _ and the dot. Each database
    /// needs a prefix of its own.
    #[arg(
        long,
        env = "TOWER_FENCE_ETCD_KEY_PREFIX",
        value_name = "TEXT",
        default_value = DEFAULT_PREFIX
    )]
    pub etcd_key_prefix: String,
}

impl EtcdArgs {
    /// Returns the URLs of the members; `None` if the leases are not in etcd.
    pub fn urls(&self) -> Result<Option<Vec<&str>>, Failure> {
        let text = self.etcd_url.as_deref().unwrap_or_default().trim();
        let urls: Vec<_> = split_urls(text).collect();
        if urls.is_empty() && !text.is_empty() {
            return Err(Failure::configuration(
                "TOWER_FENCE_ETCD_URL contains no URL",
            ));
        }
        if urls.iter().any(|url| has_password(url)) {
            return Err(Failure::configuration(format!(
                "an etcd URL contains a password: set the user in TOWER_FENCE_ETCD_USERNAME, and put the password \
                 into the variable {PASSWORD}, or into a file that {PASSWORD}_FILE names"
            )));
        }
        if !urls.is_empty() {
            return Ok(Some(urls));
        }
        let is_configured = self.etcd_username.is_some()
            || self.etcd_ca_file.is_some()
            || self.etcd_cert_file.is_some()
            || self.key_prefix() != DEFAULT_PREFIX
            || self.password()?.is_some();
        match is_configured {
            true => Err(Failure::configuration(
                "etcd is configured without its URL: set TOWER_FENCE_ETCD_URL",
            )),
            false => Ok(None),
        }
    }

    /// Returns the prefix of all key names. A blank setting counts as missing.
    pub fn key_prefix(&self) -> &str {
        or_default(&self.etcd_key_prefix, DEFAULT_PREFIX)
    }

    fn password(&self) -> Result<Option<Secret>, Failure> {
        Secret::find(PASSWORD, self.etcd_password_file.as_deref())
    }

    /// Creates the store without connecting to etcd.
    pub fn connect_lazy(
        &self,
        epochs: Fence<Postgres>,
        urls: &[&str],
    ) -> Result<EtcdLeases, Failure> {
        let mut builder = EtcdLeasesBuilder::new(epochs)
            .key_prefix(self.key_prefix())
            .client(self.client(urls)?);
        match (&self.etcd_username, self.password()?) {
            (Some(name), Some(password)) => builder = builder.user(name, password.expose()),
            (None, None) => {}
            (Some(_), None) => {
                return Err(Failure::configuration(format!(
                    "an etcd user is configured without a password: set {PASSWORD}, or name a file in {PASSWORD}_FILE"
                )));
            }
            (None, Some(_)) => {
                return Err(Failure::configuration(
                    "an etcd password is configured without a user: set TOWER_FENCE_ETCD_USERNAME",
                ));
            }
        }
        builder.connect_lazy(urls).map_err(invalid)
    }

    /// Creates the HTTP client. The client has no timeout, because a watch stays open.
    pub fn client(&self, urls: &[&str]) -> Result<Client, Failure> {
        // With `http://` URLs, a proxy would receive the password.
        let builder = Client::builder()
            .no_proxy()
            .redirect(Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            // After a burst, many connections are idle. If all of them were silently lost, the
            // retries over them would outlast a lease.
            .pool_idle_timeout(Duration::from_secs(5));
        let is_plain = urls.iter().all(|url| has_scheme(url, "http"));
        let mut builder = trust_only(builder, self.etcd_ca_file.as_deref(), is_plain)?;
        let (cert, key) = (&self.etcd_cert_file, &self.etcd_key_file);
        if let Some((pem, key)) = client_certificate(cert.as_deref(), key.as_deref())? {
            let mut identity = Zeroizing::new(pem);
            identity.push(b'\n');
            identity.extend_from_slice(key.expose().as_bytes());
            builder = builder.identity(Identity::from_pem(&identity).map_err(invalid)?);
        }
        builder.build().map_err(invalid)
    }
}

fn invalid(error: impl Error + 'static) -> Failure {
    Failure::configuration(format!("invalid etcd settings: {}", chain(&error)))
}
