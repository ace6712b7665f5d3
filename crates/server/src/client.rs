//! The server as the other commands ask it, over HTTP.

use std::{fs, net::IpAddr, path::PathBuf, time::Duration};

use clap::Args;
use reqwest::{Certificate, Url, redirect::Policy};
use tower_fence::{
    client::{HttpError, HttpLeases},
    lease::LeaseError,
};

use crate::{
    failure::{self, Failure, chain},
    secrets::{self, Secret},
};

/// How long a connection is kept without a request: less than any usual server or proxy keeps it, since a request on a
/// connection that was just closed fails.
const IDLE: Duration = Duration::from_secs(15);

#[derive(Args)]
pub struct ClientArgs {
    /// The server. Without a path, /locks is meant.
    #[arg(
        long,
        env = "TOWER_FENCE_URL",
        value_name = "URL",
        default_value = "http://127.0.0.1:4120",
        help_heading = "Server"
    )]
    pub url: String,
    /// A file with the secret that the server knows. Or the variable TOWER_FENCE_SECRET has it.
    #[arg(
        long,
        env = "TOWER_FENCE_SECRET_FILE",
        value_name = "FILE",
        help_heading = "Server"
    )]
    pub secret_file: Option<PathBuf>,
    /// A file with the certificates (PEM) to trust in place of the system's.
    #[arg(
        long,
        env = "TOWER_FENCE_CA_FILE",
        value_name = "FILE",
        help_heading = "Server"
    )]
    pub ca_file: Option<PathBuf>,
}

impl ClientArgs {
    pub fn leases(&self) -> Result<HttpLeases, Failure> {
        if secrets::has_password(&self.url) {
            return Err(Failure::usage(
                "the URL of the server has a password, which everybody sees: \
                 the secret belongs into a file that TOWER_FENCE_SECRET_FILE names",
            ));
        }
        let none = || Failure::usage("the URL of the server begins with http:// or https://");
        let mut url = Url::parse(&self.url).map_err(|_| none())?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(none());
        }
        if url.path() == "/" {
            url.set_path("/locks");
        }
        let mut builder = reqwest::Client::builder()
            .redirect(Policy::none())
            .connect_timeout(Duration::from_secs(2))
            .pool_idle_timeout(IDLE);
        if is_this_machine(&url) {
            // Nobody between here and there.
            builder = builder.no_proxy();
        }
        let secret = Secret::find("TOWER_FENCE_SECRET", self.secret_file.as_deref())?;
        if secret.is_some() && url.scheme() == "http" && !is_this_machine(&url) {
            tracing::warn!("the secret goes to the server in the clear: use https");
        }
        if let Some(path) = &self.ca_file {
            let failed = |error: String| Failure::file("cannot use", path, error);
            let pem = fs::read(path).map_err(|error| failed(error.to_string()))?;
            let trusted = Certificate::from_pem_bundle(&pem);
            let trusted = trusted.map_err(|error| failed(chain(&error)))?;
            if trusted.is_empty() {
                return Err(failed("there is no certificate in it".into()));
            }
            builder = builder.tls_certs_only(trusted);
        } else if url.scheme() == "http" {
            // Nobody has to read the roots of the system.
            builder = builder.tls_certs_only([]);
        }
        let client = builder
            .build()
            .map_err(|error| Failure::other(format!("no HTTP client: {}", chain(&error))))?;
        let leases = HttpLeases::with_client(url.as_str(), client).map_err(|_| none())?;
        match &secret {
            Some(secret) => leases
                .bearer(first_secret(secret)?)
                .map_err(|error| Failure::configuration(error.to_string())),
            None => Ok(leases),
        }
    }
}

/// The first secret of a file such as the server has, with a secret on each line.
fn first_secret(secret: &Secret) -> Result<&str, Failure> {
    let first = secrets::lines(secret.expose()).next();
    let (_, first) =
        first.ok_or_else(|| Failure::configuration("there is no secret in its file"))?;
    Ok(first)
}

fn is_this_machine(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// What a refusal means for whoever has called the command.
pub fn failure(error: &LeaseError) -> Failure {
    let status = match error {
        LeaseError::Unavailable(cause) | LeaseError::Misconfigured(cause) => {
            match cause.downcast_ref() {
                Some(HttpError::Unexpected(status) | HttpError::Refused { status, .. }) => {
                    status.as_u16()
                }
                Some(HttpError::OtherResource { .. }) => {
                    return Failure::configuration(chain(error));
                }
                _ if matches!(error, LeaseError::Misconfigured(_)) => {
                    return Failure::configuration(chain(error));
                }
                _ => return Failure::unavailable("no answer", error),
            }
        }
        LeaseError::Held { .. } => return Failure::new(failure::HELD, error.to_string()),
        LeaseError::Invalid { field, detail } => {
            let option = match &**field {
                "ttl_ms" => "--ttl",
                "lock_delay_ms" => "--lock-delay",
                "wait_ms" => "--wait",
                field => field,
            };
            return Failure::usage(format!("{option} is refused: {detail}"));
        }
        _ => return Failure::other(error.to_string()),
    };
    match status {
        401 => Failure::new(
            failure::REFUSED,
            "the server refuses the secret, or wants one: name its file in TOWER_FENCE_SECRET_FILE",
        ),
        403 => Failure::new(
            failure::REFUSED,
            "the server refuses: this needs an operator's secret; or the server has no secrets, and answers under an \
             address or localhost only",
        ),
        404 | 405 => Failure::configuration("there is no issuer at the URL of the server"),
        _ => Failure::unavailable("no lease", error),
    }
}
