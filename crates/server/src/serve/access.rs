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
    fmt,
    net::{IpAddr, SocketAddr},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
};

use axum::{
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use http::{
    HeaderValue,
    header::{AUTHORIZATION, HOST, WWW_AUTHENTICATE},
};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};
use tower_fence::{problem::ProblemType, sampler::Sampler};
use tracing::{Instrument, Span};
use zeroize::Zeroizing;

use super::{args::AccessArgs, metrics};
use crate::{
    failure::Failure,
    secrets::{self, Secret},
};

/// The minimum length of a secret, in characters.
const SHORTEST: usize = 16;
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
    known: Arc<RwLock<Known>>,
    allow_anyone: bool,
}

struct Known {
    holders: Digests,
    operators: Digests,
}

/// The SHA-256 digests of the secrets of a role.
struct Digests(Vec<[u8; 32]>);

/// The authentication schemes that a route accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Schemes {
    Bearer,
    BearerAndBasic,
}

/// The SHA-256 digest of the secret of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SecretDigest([u8; 32]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Holder,
    Operator,
}

impl Access {
    pub fn read(args: &AccessArgs) -> Result<Self, Failure> {
        Ok(Self {
            known: Arc::new(RwLock::new(Known::read(args)?)),
            allow_anyone: args.allow_anyone,
        })
    }

    /// Reads the secrets again, and replaces them if the new ones are valid. A reload cannot remove
    /// the last secret.
    pub fn replace(&self, args: &AccessArgs) -> Result<(), Failure> {
        let known = Known::read(args)?;
        if self.has_secrets() && known.is_empty() {
            return Err(Failure::configuration(
                "no secret is left: a reload cannot remove the last one",
            ));
        }
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = known;
        Ok(())
    }

    pub fn has_secrets(&self) -> bool {
        !self.known().is_empty()
    }

    /// Returns whether only clients on this machine may connect: the server has no secrets, and
    /// `--allow-anyone` is not set.
    pub fn is_local_only(&self) -> bool {
        !self.allow_anyone && !self.has_secrets()
    }

    fn known(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the role of a request, and its secret if secrets are configured; `None` if the
    /// secret is unknown or missing, or if it is the password of a holder.
    fn role(
        &self,
        authorization: Option<&HeaderValue>,
        schemes: Schemes,
    ) -> Option<(Role, Option<SecretDigest>)> {
        let known = self.known();
        if known.is_empty() {
            return Some((Role::Operator, None));
        }
        let value = authorization?.as_bytes();
        let bearer = after(value, b"Bearer ");
        let digest: [u8; 32] = match bearer {
            Some(secret) => Sha256::digest(secret.trim_ascii()).into(),
            None if schemes == Schemes::BearerAndBasic => {
                let pair = basic(value)?;
                let colon = pair.iter().position(|byte| *byte == b':')?;
                Sha256::digest(&pair[colon + 1..]).into()
            }
            None => return None,
        };
        let (operator, holder) = (known.operators.has(&digest), known.holders.has(&digest));
        let role = match (bool::from(operator), bool::from(holder)) {
            (true, _) => Role::Operator,
            // A browser repeats a password that was answered with 403, and asks for no other one.
            (false, true) if bearer.is_some() => Role::Holder,
            _ => return None,
        };
        Some((role, Some(SecretDigest(digest))))
    }

    /// Returns the span for a request of an operator. A user name that is a secret is omitted.
    fn operator_span(&self, request: &Request, authorization: Option<&HeaderValue>) -> Span {
        let peer = request.extensions().get::<SocketAddr>();
        let pair = authorization.and_then(|value| basic(value.as_bytes()));
        let pair = pair.unwrap_or_default();
        let user = pair.split(|byte| *byte == b':').next();
        let user = user.unwrap_or_default().trim_ascii();
        let (known, digest) = (self.known(), Sha256::digest(user).into());
        let is_secret = known.operators.has(&digest) | known.holders.has(&digest);
        let is_shown = !user.is_empty() && !bool::from(is_secret);
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

/// Formats a description of the accepted clients for messages.
impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.known();
        let (holders, operators) = (known.holders.0.len(), known.operators.0.len());
        match known.is_empty() {
            true => f.write_str("any client"),
            false => write!(
                f,
                "clients with a secret (holders: {holders}, operators: {operators})"
            ),
        }
    }
}

impl Known {
    fn read(args: &AccessArgs) -> Result<Self, Failure> {
        let read = |role, name, file: &Option<_>| {
            let found = Secret::find(name, Option::as_deref(file))?;
            found.map_or(Ok(Digests(vec![])), |text| Digests::of(role, text.expose()))
        };
        let known = Self {
            holders: read(
                "holders",
                "TOWER_FENCE_HOLDER_SECRETS",
                &args.holder_secrets_file,
            )?,
            operators: read(
                "operators",
                "TOWER_FENCE_OPERATOR_SECRETS",
                &args.operator_secrets_file,
            )?,
        };
        if known.has_one_twice() {
            tracing::warn!(
                "a secret of holders is also a secret of operators: clients with it may do everything"
            );
        }
        Ok(known)
    }

    /// Returns whether a secret has both roles, which is probably a mistake.
    fn has_one_twice(&self) -> bool {
        let holders = &self.holders.0;
        self.operators.0.iter().any(|one| holders.contains(one))
    }

    fn is_empty(&self) -> bool {
        self.holders.0.is_empty() && self.operators.0.is_empty()
    }
}

impl Digests {
    /// Parses a text with one secret per line.
    fn of(role: &str, text: &str) -> Result<Self, Failure> {
        let mut digests = vec![];
        for (number, secret) in secrets::lines(text) {
            let refused = |why: &str| {
                let text = format!("line {number} of the secrets of {role} {why}");
                Err(Failure::configuration(text))
            };
            if secret.len() < SHORTEST {
                return refused("is too short: a secret must have at least 16 characters");
            }
            if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
                return refused("has a blank or another character that is invalid in a header");
            }
            digests.push(Sha256::digest(secret).into());
        }
        if digests.is_empty() {
            let text = format!("the file or variable for the secrets of {role} contains no secret");
            return Err(Failure::configuration(text));
        }
        Ok(Self(digests))
    }

    /// Compares the digest with all known ones, each in constant time.
    fn has(&self, digest: &[u8; 32]) -> Choice {
        let equal = self.0.iter().map(|known| known.ct_eq(digest));
        equal.fold(Choice::from(0), |found, equal| found | equal)
    }
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
    match access.role(authorization.as_ref(), schemes) {
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

/// Returns the user name and the password of HTTP Basic, as `USER:PASSWORD`.
fn basic(value: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let encoded = after(value, b"Basic ")?;
    let pair = BASE64_STANDARD.decode(encoded.trim_ascii()).ok()?;
    Some(Zeroizing::new(pair))
}

/// Returns the rest of a header value after the name of a scheme.
fn after<'a>(value: &'a [u8], scheme: &[u8]) -> Option<&'a [u8]> {
    let (given, rest) = value.split_at_checked(scheme.len())?;
    given.eq_ignore_ascii_case(scheme).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLDER: &str = "holder-0123456789";
    const OPERATOR: &str = "operator-0123456789";

    fn access() -> Access {
        let known = Known {
            holders: Digests::of(
                "holders",
                &format!("# old\nanother-0123456789\n\n{HOLDER}\n"),
            )
            .unwrap(),
            operators: Digests::of("operators", OPERATOR).unwrap(),
        };
        Access {
            known: Arc::new(RwLock::new(known)),
            allow_anyone: false,
        }
    }

    #[test]
    fn only_known_secrets_have_a_role() {
        let role = |value: String| {
            let value = HeaderValue::try_from(value).unwrap();
            let found = access().role(Some(&value), Schemes::Bearer);
            found.map(|(role, _)| role)
        };
        for scheme in ["Bearer", "bearer", "BEARER"] {
            assert_eq!(role(format!("{scheme} {HOLDER}")), Some(Role::Holder));
            assert_eq!(role(format!("{scheme} {OPERATOR}")), Some(Role::Operator));
        }
        for wrong in [
            "".into(),
            "Bearer".into(),
            "Bearer ".into(),
            format!("Basic {HOLDER}"),
            format!("Bearer {HOLDER}x"),
            format!("Bearer {}", &HOLDER[1..]),
            format!("Bearer {HOLDER} {OPERATOR}"),
            "Bearer # old".into(),
            HOLDER.into(),
        ] {
            assert_eq!(role(wrong.clone()), None, "{wrong}");
        }
        assert!(access().role(None, Schemes::Bearer).is_none());
    }

    #[test]
    fn the_console_takes_a_secret_as_a_password() {
        let role = |pair: &str, schemes| {
            let value = format!("Basic {}", BASE64_STANDARD.encode(pair));
            let found = access().role(Some(&HeaderValue::try_from(value).unwrap()), schemes);
            found.map(|(role, _)| role)
        };
        let both = Schemes::BearerAndBasic;
        assert_eq!(
            role(&format!("anybody:{OPERATOR}"), both),
            Some(Role::Operator)
        );
        for wrong in [
            format!(":{HOLDER}"),
            OPERATOR.into(),
            format!("{OPERATOR}:"),
            format!("a:b:{OPERATOR}"),
        ] {
            assert_eq!(role(&wrong, both), None, "{wrong}");
        }
        assert_eq!(role(&format!(":{OPERATOR}"), Schemes::Bearer), None);
    }

    #[test]
    fn error_about_a_secret_does_not_contain_it() {
        for text in [
            "hunter2",
            "with a blank 0123456789",
            "",
            "# nothing",
            "naïve-0123456789-0",
        ] {
            let refused = Digests::of("holders", text).err().unwrap();
            assert!(
                text.is_empty() || !refused.text.contains(text),
                "{}",
                refused.text
            );
        }
    }
}
