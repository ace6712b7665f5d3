//! The certificate of the server and its key, from files that can be reloaded.

use std::sync::{Arc, PoisonError, RwLock};

use rustls::{ServerConfig, crypto::ring, sign::SingleCertAndKey};
use tokio_rustls::TlsAcceptor;

use super::args::AccessArgs;
use crate::{
    certificates::{certified, outdated},
    failure::{Failure, chain},
};

/// The certificate in use. Clones share it, and [`replace`](Self::replace) replaces it for all
/// clones.
#[derive(Clone)]
pub struct Tls(Arc<RwLock<Arc<ServerConfig>>>);

impl Tls {
    /// Reads the files; `None` if none are configured.
    pub fn read(args: &AccessArgs) -> Result<Option<Self>, Failure> {
        let config = config(args)?;
        Ok(config.map(|config| Self(Arc::new(RwLock::new(config)))))
    }

    /// Reads the files again, and uses them if they are valid. Open connections are not affected.
    pub fn replace(&self, args: &AccessArgs) -> Result<(), Failure> {
        if let Some(config) = config(args)? {
            *self.0.write().unwrap_or_else(PoisonError::into_inner) = config;
            warn_if_outdated(args);
        }
        Ok(())
    }

    /// Returns the acceptor for the next connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner)).into()
    }
}

/// Warns if the certificate has expired or is not valid yet.
pub fn warn_if_outdated(args: &AccessArgs) {
    if let Some(cert) = &args.tls_cert_file
        && let Ok(Some(why)) = outdated(cert)
    {
        tracing::warn!(file = %cert.display(), "{why}, so clients refuse it");
    }
}

fn config(args: &AccessArgs) -> Result<Option<Arc<ServerConfig>>, Failure> {
    let (Some(cert), Some(key)) = (&args.tls_cert_file, &args.tls_key_file) else {
        return Ok(None);
    };
    let (certified, ..) = certified(cert, key)?;
    let resolver = Arc::new(SingleCertAndKey::from(certified));
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::configuration(chain(&error)))?
        .with_no_client_auth()
        .with_cert_resolver(resolver);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(Arc::new(config)))
}
