//! Certificates and their keys: that of the server, and those with which the program connects over
//! TLS.

use std::{fs, path::Path};

use reqwest::{Certificate, ClientBuilder};
use rustls::{
    CertificateError, Error, RootCertStore,
    client::verify_server_cert_signed_by_trust_anchor,
    crypto::ring::sign::any_supported_type,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::ParsedCertificate,
    sign::CertifiedKey,
};

use crate::{
    failure::{Failure, chain},
    secrets::Secret,
};

/// Reads a file of certificate authorities, in PEM.
pub fn authorities(path: &Path) -> Result<Vec<u8>, Failure> {
    read(path).map(|(pem, _)| pem)
}

/// Makes an HTTP client trust only the certificate authorities in a file, if one is configured.
pub fn trust_only(
    client: ClientBuilder,
    file: Option<&Path>,
    is_plain: bool,
) -> Result<ClientBuilder, Failure> {
    let trusted = match file {
        Some(path) => Certificate::from_pem_bundle(&authorities(path)?)
            .map_err(|error| Failure::file("cannot use", path, chain(&error)))?,
        // Plain HTTP needs no certificates, so those of the system are not read.
        None if is_plain => vec![],
        None => return Ok(client),
    };
    Ok(client.tls_certs_only(trusted))
}

/// Reads a client certificate and its key, in PEM, if both are configured.
pub fn client_certificate(
    cert: Option<&Path>,
    key: Option<&Path>,
) -> Result<Option<(Vec<u8>, Secret)>, Failure> {
    let (Some(cert), Some(key)) = (cert, key) else {
        return Ok(None);
    };
    let (_, pem, key) = certified(cert, key)?;
    Ok(Some((pem, key)))
}

/// Reads a certificate and its key, and checks that they match. Also returns the texts of both.
pub fn certified(cert: &Path, key: &Path) -> Result<(CertifiedKey, Vec<u8>, Secret), Failure> {
    let failed = |path, error: &str| Failure::file("cannot use", path, error);
    let (pem, chain_of) = read(cert)?;
    let text = Secret::from_file(key)?;
    // The error is not shown, because it could reveal a part of the key.
    let private = PrivateKeyDer::from_pem_slice(text.expose().as_bytes()).map_err(|_| {
        failed(
            key,
            "it contains no private key (PEM), or the key is encrypted",
        )
    })?;
    let private = any_supported_type(&private)
        .map_err(|_| failed(key, "the type of the private key is not supported"))?;
    let certified = CertifiedKey::new(chain_of, private);
    certified
        .keys_match()
        .map_err(|error| failed(cert, &format!("with its key: {}", chain(&error))))?;
    Ok((certified, pem, text))
}

/// Returns why clients refuse the first certificate of a file at this time; `None` if its dates are
/// valid.
pub fn outdated(path: &Path) -> Result<Option<&'static str>, Failure> {
    let (_, found) = read(path)?;
    let parsed = ParsedCertificate::try_from(&found[0])
        .map_err(|error| Failure::file("cannot use", path, chain(&error)))?;
    // Without authorities, the verification always fails, but it checks the dates first.
    let (roots, now) = (RootCertStore::empty(), UnixTime::now());
    let verified = verify_server_cert_signed_by_trust_anchor(&parsed, &roots, &[], now, &[]);
    use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    Ok(match verified {
        Err(Error::InvalidCertificate(Expired | ExpiredContext { .. })) => {
            Some("the certificate has expired")
        }
        Err(Error::InvalidCertificate(NotValidYet | NotValidYetContext { .. })) => {
            Some("the certificate is not valid yet")
        }
        _ => None,
    })
}

/// Reads a file with at least one certificate.
fn read(path: &Path) -> Result<(Vec<u8>, Vec<CertificateDer<'static>>), Failure> {
    let pem = fs::read(path).map_err(|error| Failure::file("cannot read", path, error))?;
    let found = CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|error| Failure::file("cannot use", path, chain(&error)))?;
    match found.is_empty() {
        true => Err(Failure::file(
            "cannot use",
            path,
            "it contains no certificate",
        )),
        false => Ok((pem, found)),
    }
}
