//! The secrets of clients, and the roles that they have.

use std::fmt;

use base64::{Engine, prelude::BASE64_STANDARD};
use http::HeaderValue;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};
use zeroize::Zeroizing;

use super::args::AccessArgs;
use crate::{
    failure::Failure,
    secrets::{self, Secret},
};

/// The minimum length of a secret, in characters.
const SHORTEST: usize = 16;

/// The secrets of holders and of operators.
pub struct ClientSecrets {
    holders: Digests,
    operators: Digests,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Holder,
    Operator,
}

/// The authentication schemes that a route accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schemes {
    Bearer,
    BearerAndBasic,
}

/// The SHA-256 digest of the secret of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SecretDigest([u8; 32]);

impl ClientSecrets {
    pub fn read(args: &AccessArgs) -> Result<Self, Failure> {
        let read = |role, name, file: &Option<_>| {
            let found = Secret::find(name, Option::as_deref(file))?;
            found.map_or(Ok(Digests(vec![])), |text| Digests::of(role, text.expose()))
        };
        let secrets = Self {
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
        if secrets.has_one_twice() {
            tracing::warn!(
                "a secret of holders is also a secret of operators: clients with it have the rights of operators"
            );
        }
        Ok(secrets)
    }

    /// Returns whether a secret has both roles, which is probably a mistake.
    fn has_one_twice(&self) -> bool {
        let holders = &self.holders.0;
        self.operators.0.iter().any(|one| holders.contains(one))
    }

    pub fn is_empty(&self) -> bool {
        self.holders.0.is_empty() && self.operators.0.is_empty()
    }

    /// Returns whether a text is one of the secrets.
    pub fn contains(&self, text: &[u8]) -> bool {
        let digest = Sha256::digest(text).into();
        (self.operators.has(&digest) | self.holders.has(&digest)).into()
    }

    /// Returns the role of a request, and its secret if secrets are configured; `None` if the
    /// secret is unknown or missing, or if it is the password of a holder.
    pub fn role(
        &self,
        authorization: Option<&HeaderValue>,
        schemes: Schemes,
    ) -> Option<(Role, Option<SecretDigest>)> {
        if self.is_empty() {
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
        let (operator, holder) = (self.operators.has(&digest), self.holders.has(&digest));
        let role = match (bool::from(operator), bool::from(holder)) {
            (true, _) => Role::Operator,
            // A browser repeats a password that was answered with 403, and asks for no other one.
            (false, true) if bearer.is_some() => Role::Holder,
            _ => return None,
        };
        Some((role, Some(SecretDigest(digest))))
    }
}

/// Formats a description of the accepted clients for messages.
impl fmt::Display for ClientSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (holders, operators) = (self.holders.0.len(), self.operators.0.len());
        match self.is_empty() {
            true => f.write_str("any client"),
            false => write!(
                f,
                "clients with a secret (holders: {holders}, operators: {operators})"
            ),
        }
    }
}

/// The SHA-256 digests of the secrets of a role.
struct Digests(Vec<[u8; 32]>);

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

/// Returns the user name and the password of HTTP Basic, as `USER:PASSWORD`.
pub fn basic(value: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
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

    fn secrets() -> ClientSecrets {
        ClientSecrets {
            holders: Digests::of(
                "holders",
                &format!("# old\nanother-0123456789\n\n{HOLDER}\n"),
            )
            .unwrap(),
            operators: Digests::of("operators", OPERATOR).unwrap(),
        }
    }

    #[test]
    fn only_known_secrets_have_a_role() {
        let role = |value: String| {
            let value = HeaderValue::try_from(value).unwrap();
            let found = secrets().role(Some(&value), Schemes::Bearer);
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
        assert!(secrets().role(None, Schemes::Bearer).is_none());
    }

    #[test]
    fn the_console_takes_a_secret_as_a_password() {
        let role = |pair: &str, schemes| {
            let value = format!("Basic {}", BASE64_STANDARD.encode(pair));
            let found = secrets().role(Some(&HeaderValue::try_from(value).unwrap()), schemes);
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
