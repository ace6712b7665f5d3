//! The HTTP client of the commands that use a server.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use clap::Args;
use reqwest::{Url, redirect::Policy};
use tower_fence::{
    client::{HttpError, HttpLeases},
    lease::LeaseError,
};

use crate::{
    certificates::trust_only,
    failure::{self, Failure, chain, chain_on},
    secrets::{self, Secret},
};

/// How long an idle connection is kept. This is shorter than the idle timeout of most servers and
/// proxies, because a request on a connection that the other side has just closed fails.
const IDLE: Duration = Duration::from_secs(15);

#[derive(Args)]
#[command(next_help_heading = "Server")]
pub struct ClientArgs {
    /// The URL of the server. Without a path, /locks is added.
    #[arg(
        long,
        env = "TOWER_FENCE_URL",
        value_name = "URL",
        default_value = "http://127.0.0.1:4120"
    )]
    pub url: String,
    /// A file with the secret for the server. The variable TOWER_FENCE_SECRET is an alternative.
    #[arg(long, env = "TOWER_FENCE_SECRET_FILE", value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// A file with the certificate authorities to trust (PEM), instead of those of the system.
    #[arg(long, env = "TOWER_FENCE_CA_FILE", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
}

impl ClientArgs {
    pub fn leases(&self) -> Result<HttpLeases, Failure> {
        if secrets::has_password(&self.url) {
            return Err(Failure::usage(
                "the URL of the server contains a password, which other users of the machine can see: \
                 put the secret into a file that TOWER_FENCE_SECRET_FILE names",
            ));
        }
        let none = || Failure::usage("the URL of the server must begin with http:// or https://");
        let mut url = Url::parse(&self.url).map_err(|_| none())?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(none());
        }
        if url.path() == "/" {
            url.set_path("/locks");
        }
        let mut builder = reqwest::Client::builder()
            .redirect(Policy::none())
            .http1_only()
            .connect_timeout(Duration::from_secs(2))
            .pool_idle_timeout(IDLE);
        if is_this_machine(&url) {
            // A proxy would resolve this name to its own machine.
            builder = builder.no_proxy();
        }
        let secret = Secret::find("TOWER_FENCE_SECRET", self.secret_file.as_deref())?;
        if secret.is_some() && url.scheme() == "http" && !is_this_machine(&url) {
            tracing::warn!("the secret is sent unencrypted: use https");
        }
        let builder = trust_only(builder, self.ca_file.as_deref(), url.scheme() == "http")?;
        let client = builder.build().map_err(|error| {
            Failure::other(format!("cannot create an HTTP client: {}", chain(&error)))
        })?;
        let leases = HttpLeases::with_client(url.as_str(), client).map_err(|_| none())?;
        match &secret {
            Some(secret) => {
                // Like a secret file of the server, the file may contain one secret per line.
                let first = secrets::lines(secret.expose()).next();
                let (_, first) = first
                    .ok_or_else(|| Failure::configuration("the secret for the server is empty"))?;
                let leases = leases.bearer(first);
                leases.map_err(|error| Failure::configuration(error.to_string()))
            }
            None => Ok(leases),
        }
    }
}

fn is_this_machine(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// Converts an error of a lease call into the failure of a command.
pub fn failure(error: &LeaseError) -> Failure {
    let (status, refused) = match error {
        LeaseError::Unavailable(cause) | LeaseError::Misconfigured(cause) => {
            match cause.downcast_ref() {
                Some(
                    refused @ (HttpError::Unexpected { status, .. }
                    | HttpError::Refused { status, .. }),
                ) => (status.as_u16(), refused),
                Some(HttpError::OtherResource { .. }) => {
                    return Failure::configuration(chain(error));
                }
                Some(error) => return Failure::unavailable(failure::NO_ANSWER, error),
                None if matches!(error, LeaseError::Misconfigured(_)) => {
                    return Failure::configuration(chain(error));
                }
                // For example, the program itself calls the store.
                None => return Failure::new(failure::UNAVAILABLE, chain(error)),
            }
        }
        LeaseError::Held { resource, .. } => {
            return Failure::new(failure::HELD, chain_on(error, resource));
        }
        LeaseError::Lost { resource }
        | LeaseError::TooManyWaiters { resource }
        | LeaseError::Exhausted { resource, .. } => {
            return Failure::other(chain_on(error, resource));
        }
        LeaseError::Invalid { field, detail } => {
            let option = match &**field {
                "ttl_ms" => "--ttl",
                "lock_delay_ms" => "--lock-delay",
                "wait_ms" => "--wait",
                field => field,
            };
            return Failure::usage(format!("invalid {option}: {detail}"));
        }
        _ => return Failure::other(error.to_string()),
    };
    match status {
        401 => Failure::new(
            failure::REFUSED,
            "the server rejects the secret, or requires one: name a file with the secret in TOWER_FENCE_SECRET_FILE",
        ),
        403 => Failure::new(failure::REFUSED, chain(refused)),
        404 | 405 => Failure::configuration(
            "the server at this URL is not an issuer, or lacks the routes for operators, which `leases` and `break` need",
        ),
        300..=399 => Failure::configuration(
            "the server redirects the request: set --url (TOWER_FENCE_URL) to the final URL",
        ),
        407 | 410 => Failure::configuration(chain(refused)),
        _ => Failure::new(failure::UNAVAILABLE, chain(refused)),
    }
}
