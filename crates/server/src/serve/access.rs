//! Authorization by the bearer secrets of holders and of operators.
//!
//! 1. If no secret is configured, every client that can connect to the port may do everything.
//!    Unless `--allow-anyone` is set, the server then listens only on loopback addresses. To block
//!    DNS rebinding, it also accepts only requests whose `Host` is an IP address or `localhost`.
//! 2. If a secret is configured, every request for leases needs one. Every route that is not listed
//!    in [`HOLDERS`] requires the secret of an operator.
//! 3. The console also accepts the secret of an operator as a password (HTTP Basic, with any user
//!    name), because a browser cannot send it in another way. The console itself refuses requests
//!    that pages of other sites send from that browser.
//! 4. Every log line about a request that only operators may send contains the address of the
//!    sender and the user name. The server does not check the user name.
//! 5. The log names the sender of a request that is refused, at most once per second for each
//!    reason.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
};

use axum::{
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{
    HeaderValue,
    header::{AUTHORIZATION, HOST, WWW_AUTHENTICATE},
};
use tower_fence::{problem::ProblemType, sampler::Sampler};
use tracing::{Instrument, Span};

use super::{
    args::AccessArgs,
    metrics,
    roles::{ClientSecrets, Role, Schemes, basic},
};
use crate::failure::Failure;

/// The routes of holders.
const HOLDERS: [&str; 2] = ["/locks/{resource}", "/locks/openapi.json"];
/// The values of `WWW-Authenticate` for a missing and for an unknown secret.
pub const CHALLENGES: [&str; 2] = [
    r#"Bearer realm="tower-fence""#,
    r#"Bearer realm="tower-fence", error="invalid_token""#,
];
/// The path of the console.
pub const CONSOLE: &str = "/console";

/// The secrets in use. Clones share them, and [`replace`](Self::replace) replaces them for all
/// clones.
#[derive(Clone)]
pub struct Access {
    secrets: Arc<RwLock<ClientSecrets>>,
    allow_anyone: bool,
}

impl Access {
    pub fn read(args: &AccessArgs) -> Result<Self, Failure> {
        Ok(Self {
            secrets: Arc::new(RwLock::new(ClientSecrets::read(args)?)),
            allow_anyone: args.allow_anyone,
        })
    }

    /// Reads the secrets again, and replaces them if the new ones are valid. A reload cannot remove
    /// the last secret.
    pub fn replace(&self, args: &AccessArgs) -> Result<(), Failure> {
        let secrets = ClientSecrets::read(args)?;
        if self.has_secrets() && secrets.is_empty() {
            return Err(Failure::configuration(
                "no secret is left: a reload cannot remove the last one",
            ));
        }
        *self.secrets.write().unwrap_or_else(PoisonError::into_inner) = secrets;
        Ok(())
    }

    pub fn has_secrets(&self) -> bool {
        !self.secrets().is_empty()
    }

    /// Returns whether only clients on this machine may connect: the server has no secrets, and
    /// `--allow-anyone` is not set.
    pub fn is_local_only(&self) -> bool {
        !self.allow_anyone && !self.has_secrets()
    }

    /// Returns the secrets in use.
    pub fn secrets(&self) -> RwLockReadGuard<'_, ClientSecrets> {
        self.secrets.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the span for a request of an operator. A user name that is a secret is omitted.
    fn operator_span(&self, request: &Request, authorization: Option<&HeaderValue>) -> Span {
        let peer = request.extensions().get::<SocketAddr>();
        let pair = authorization.and_then(|value| basic(value.as_bytes()));
        let pair = pair.unwrap_or_default();
        let user = pair.split(|byte| *byte == b':').next();
        let user = user.unwrap_or_default().trim_ascii();
        let is_shown = !user.is_empty() && !self.secrets().contains(user);
        let user = is_shown.then(|| String::from_utf8_lossy(user));
        // The log escapes the user name, because it is not recorded with `Display`.
        tracing::warn_span!(
            "operator",
            peer = peer.map(tracing::field::display),
            user = user.as_deref()
        )
    }

    /// Returns whether a request is addressed to this server. If only clients on this machine may
    /// connect, each host that the request names must be an IP address or `localhost`. A browser
    /// names the host in each request.
    fn is_addressed_here(&self, request: &Request) -> bool {
        if !self.is_local_only() {
            return true;
        }
        let hosts = request.headers().get_all(HOST).iter();
        let mut hosts = hosts.map(|host| host.to_str().unwrap_or_default());
        let target = request.uri().authority();
        hosts.all(is_local) && target.is_none_or(|target| is_local(target.as_str()))
    }
}

/// Returns whether a host, with or without a port, is an IP address or `localhost`.
fn is_local(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_matches(['[', ']']).parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok()
}

/// Returns whether a route is for holders. All other routes are for operators.
pub fn is_for_holders(route: &str) -> bool {
    HOLDERS.contains(&route)
}

/// Middleware that forwards a request if its secret has the role for its route.
pub async fn check(State(access): State<Access>, mut request: Request, next: Next) -> Response {
    if !access.is_addressed_here(&request) {
        static ELSEWHERE: Sampler = Sampler::new();
        let refused = "refused a request whose Host is neither an IP address nor localhost";
        report(&request, None, &ELSEWHERE, refused);
        let detail =
            "without secrets, the server accepts only an IP address or localhost as the Host";
        let problem = metrics::refused(ProblemType::OperatorsOnly);
        return problem.detail(detail).into_response();
    }
    // The inner services do not need the secret.
    let authorization = request.headers_mut().remove(AUTHORIZATION);
    let route = request.extensions().get::<MatchedPath>();
    let for_holders = route.is_some_and(|route| is_for_holders(route.as_str()));
    // The console is a nested service, which has no matched route, so its path is compared.
    let path = request.uri().path().strip_prefix(CONSOLE);
    let path = path.filter(|path| path.is_empty() || path.starts_with('/'));
    let schemes = path.map_or(Schemes::Bearer, |_| Schemes::BearerAndBasic);
    // A browser asks for the password when it loads the page. After a change of the secrets, it
    // must not ask again for each request of an open page.
    let is_page = path.is_some_and(|path| !path.starts_with("/api/"));
    let role = access.secrets().role(authorization.as_ref(), schemes);
    match role {
        Some((role, secret)) if role == Role::Operator || for_holders => {
            if let Some(secret) = secret {
                request.extensions_mut().insert(secret);
            }
            let span = match for_holders {
                true => Span::none(),
                false => access.operator_span(&request, authorization.as_ref()),
            };
            next.run(request).instrument(span).await
        }
        Some(_) => {
            static HOLDER: Sampler = Sampler::new();
            let refused = "refused a request for operators that has the secret of a holder";
            report(&request, None, &HOLDER, refused);
            metrics::refused(ProblemType::OperatorsOnly).into_response()
        }
        None => {
            static UNKNOWN: Sampler = Sampler::new();
            let refused = "refused a request without a known secret";
            report(&request, Some(authorization.is_some()), &UNKNOWN, refused);
            let challenge = match authorization {
                _ if is_page => r#"Basic realm="tower-fence operators""#,
                None => CHALLENGES[0],
                Some(_) => CHALLENGES[1],
            };
            let problem = metrics::refused(ProblemType::Unauthorized);
            ([(WWW_AUTHENTICATE, challenge)], problem).into_response()
        }
    }
}

/// Logs the refusal of a request and, if given, whether the request has an `Authorization` header.
fn report(request: &Request, has_authorization: Option<bool>, sampler: &Sampler, refused: &str) {
    if let Some(suppressed) = sampler.next() {
        let peer = request.extensions().get::<SocketAddr>();
        tracing::info!(
            peer = peer.map(tracing::field::display),
            method = %request.method(),
            path = request.uri().path(),
            has_authorization,
            suppressed,
            "{refused}"
        );
    }
}
