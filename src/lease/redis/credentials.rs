//! Certificates of connections, and credentials of a master that sentinels report.

use redis::{
    Client, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, RedisConnectionInfo,
    RedisError, RedisResult, TlsMode,
    cluster::ClusterClientBuilder,
    sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType},
};
#[cfg(feature = "redis-tls")]
use redis::{ClientTlsConfig, TlsCertificates};

/// Credentials and certificates, which are empty by default.
#[derive(Clone, Default)]
pub(super) struct Credentials {
    /// The user, the password and the database of the master that the sentinels report.
    pub(super) master: RedisConnectionInfo,
    /// Whether to connect to this master over TLS.
    pub(super) master_tls: bool,
    #[cfg(feature = "redis-tls")]
    authority: Option<Vec<u8>>,
    #[cfg(feature = "redis-tls")]
    client: Option<ClientTlsConfig>,
}

#[cfg(feature = "redis-tls")]
impl Credentials {
    pub(super) fn trust_only(&mut self, authority: Vec<u8>) {
        self.authority = Some(authority);
    }

    pub(super) fn show(&mut self, client_cert: Vec<u8>, client_key: Vec<u8>) {
        self.client = Some(ClientTlsConfig {
            client_cert,
            client_key,
        });
    }

    fn certificates(&self) -> Option<TlsCertificates> {
        let any = self.authority.is_some() || self.client.is_some();
        any.then(|| TlsCertificates {
            client_tls: self.client.clone(),
            root_cert: self.authority.clone(),
        })
    }
}

impl Credentials {
    /// Returns the client of one server. Refuses certificates without TLS.
    pub(super) fn client(&self, server: impl IntoConnectionInfo) -> RedisResult<Client> {
        self.refuse_master()?;
        #[cfg(feature = "redis-tls")]
        if let Some(certificates) = self.certificates() {
            check(&certificates)?;
            return Client::build_with_tls(server, certificates);
        }
        Client::open(server)
    }

    /// Returns the client of the sentinels. Certificates apply to the connections that use TLS.
    pub(super) fn sentinels(
        &self,
        sentinels: &[ConnectionInfo],
        service: &str,
    ) -> RedisResult<SentinelClient> {
        let Some(first) = sentinels.first() else {
            return Err((
                ErrorKind::EmptySentinelList,
                "the list of sentinels is empty",
            )
                .into());
        };
        let (own, all_tls) = (first.redis_settings(), sentinels.iter().all(has_tls));
        for sentinel in sentinels.iter().map(ConnectionInfo::redis_settings) {
            if (sentinel.username(), sentinel.password()) != (own.username(), own.password()) {
                return Err(invalid(
                    "all sentinels must have the same user and password",
                ));
            }
            if sentinel.db() != 0 {
                return Err(invalid(
                    "sentinels have no database: use master_database for that of the master",
                ));
            }
        }
        // Without a password, the client would not send the user either.
        if self.master.username().is_some() && self.master.password().is_none() {
            return Err(invalid("a user of the master also needs a password"));
        }
        if !all_tls && sentinels.iter().any(has_tls) {
            return Err(invalid("either all sentinels must use TLS, or none"));
        }
        let addresses = sentinels.iter().map(|sentinel| sentinel.addr().clone());
        let master = SentinelServerType::Master;
        let mut builder = SentinelClientBuilder::new(addresses, service, master)?
            .set_client_to_sentinel_protocol(own.protocol())
            .set_client_to_redis_db(self.master.db());
        if let Some(username) = own.username() {
            builder = builder.set_client_to_sentinel_username(username);
        }
        if let Some(password) = own.password() {
            builder = builder.set_client_to_sentinel_password(password);
        }
        if let Some(username) = self.master.username() {
            builder = builder.set_client_to_redis_username(username);
        }
        if let Some(password) = self.master.password() {
            builder = builder.set_client_to_redis_password(password);
        }
        if self.master_tls {
            builder = builder.set_client_to_redis_tls_mode(TlsMode::Secure);
        }
        #[cfg(feature = "redis-tls")]
        if let Some(certificates) = self.certificates() {
            check(&certificates)?;
            if !all_tls && !self.master_tls {
                return Err(unused());
            }
            if all_tls {
                builder = builder.set_client_to_sentinel_certificates(certificates.clone());
            }
            if self.master_tls {
                builder = builder.set_client_to_redis_certificates(certificates);
            }
        }
        builder.build()
    }

    /// Returns the settings of a cluster client. Refuses certificates for nodes without TLS.
    pub(super) fn cluster(&self, nodes: &[ConnectionInfo]) -> RedisResult<ClusterClientBuilder> {
        self.refuse_master()?;
        let builder = ClusterClientBuilder::new(nodes.iter().cloned());
        #[cfg(feature = "redis-tls")]
        if let Some(certificates) = self.certificates() {
            check(&certificates)?;
            if !nodes.iter().all(has_tls) {
                return Err(unused());
            }
            return Ok(builder.certs(certificates));
        }
        Ok(builder)
    }

    fn refuse_master(&self) -> RedisResult<()> {
        let master = &self.master;
        let is_set = master.username().is_some() || master.password().is_some();
        match is_set || master.db() != 0 || self.master_tls {
            true => Err(invalid(
                "settings of a master require sentinels: for a single server, put them in its URL",
            )),
            false => Ok(()),
        }
    }
}

fn has_tls(server: &ConnectionInfo) -> bool {
    matches!(server.addr(), ConnectionAddr::TcpTls { .. })
}

fn invalid(detail: &'static str) -> RedisError {
    (ErrorKind::InvalidClientConfig, detail).into()
}

#[cfg(feature = "redis-tls")]
fn unused() -> RedisError {
    invalid("certificates require TLS: use rediss:// URLs")
}

/// Reports invalid certificates before the first connection.
#[cfg(feature = "redis-tls")]
fn check(certificates: &TlsCertificates) -> RedisResult<()> {
    const BEGIN: &[u8] = b"-----BEGIN CERTIFICATE-----";
    let has_some = |pem: &[u8]| pem.windows(BEGIN.len()).any(|part| part == BEGIN);
    let client = certificates.client_tls.as_ref();
    let client = client.map(|client| client.client_cert.as_slice());
    for pem in certificates.root_cert.as_deref().into_iter().chain(client) {
        if !has_some(pem) {
            return Err(invalid("the PEM contains no certificate"));
        }
    }
    // The original error is not returned, because it may quote the key.
    match Client::build_with_tls("rediss://127.0.0.1", certificates.clone()) {
        Ok(_) => Ok(()),
        Err(_) => Err(invalid("invalid PEM in a certificate or key")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sentinels(urls: &[&str]) -> Vec<ConnectionInfo> {
        let infos = urls.iter().map(|url| url.into_connection_info().unwrap());
        infos.collect()
    }

    #[test]
    fn sentinels_that_differ_are_refused_without_their_secrets() {
        let none = Credentials::default();
        for urls in [
            &["redis://:hunter2@a", "redis://:hunter3@b"][..],
            &["redis://:hunter2@a", "redis://b"],
            &["redis://me:hunter2@a", "redis://you:hunter2@b"],
            &["redis://:hunter2@a/3"],
            &[],
        ] {
            let refused = none.sentinels(&sentinels(urls), "main").err().unwrap();
            assert!(!refused.to_string().contains("hunter"), "{refused}");
        }
        let equal = sentinels(&["redis://me:hunter2@a", "redis://me:hunter2@b"]);
        assert!(none.sentinels(&equal, "main").is_ok());
    }

    #[test]
    fn settings_of_a_master_are_refused_without_sentinels() {
        let mut credentials = Credentials::default();
        credentials.master = credentials.master.set_password("hunter2");
        let refused = credentials.client("redis://a").unwrap_err().to_string();
        assert!(refused.contains("in its URL"), "{refused}");
        assert!(!refused.contains("hunter2"), "{refused}");
        assert!(credentials.cluster(&sentinels(&["redis://a"])).is_err());
    }
}
