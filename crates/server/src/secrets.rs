//! Secrets, which are read from files or the environment, never from the command line, and are
//! never shown.

use std::{
    env::{self, VarError},
    fmt, fs,
    os::unix::fs::PermissionsExt,
    path::Path,
};

use reqwest::Url;
use zeroize::Zeroizing;

use crate::failure::Failure;

/// A text that is never shown, and is erased from memory on drop.
#[derive(Clone)]
pub struct Secret(Zeroizing<String>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Secret {
    /// Returns the text. Call this only where the secret is used.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Reads a file, and trims its text. Warns if every user of the machine can read the file.
    pub fn from_file(path: &Path) -> Result<Self, Failure> {
        let failed = |error: &dyn fmt::Display| Failure::file("cannot read", path, error);
        let bytes = Zeroizing::new(fs::read(path).map_err(|error| failed(&error))?);
        if let Ok(metadata) = fs::metadata(path)
            && metadata.permissions().mode() & 0o004 != 0
        {
            let path = path.display();
            tracing::warn!(%path, "every user of this machine can read a file with secrets");
        }
        let text = std::str::from_utf8(&bytes).map_err(|_| failed(&"it is not UTF-8"))?;
        Ok(Self::of(text))
    }

    fn of(text: &str) -> Self {
        Self(Zeroizing::new(text.trim().to_owned()))
    }

    /// Returns the secret in the variable `name` or in `file`; `None` if there is no file and the
    /// variable is missing or empty.
    ///
    /// # Errors
    ///
    /// Fails if both are set, the variable is not UTF-8, or the file cannot be read.
    pub fn find(name: &str, file: Option<&Path>) -> Result<Option<Self>, Failure> {
        match (variable(name)?.map(Zeroizing::new), file) {
            (Some(_), Some(_)) => Err(Failure::configuration(format!(
                "{name} and {name}_FILE are both set: set only one of them"
            ))),
            (Some(text), None) => Ok(Some(Self::of(&text))),
            (None, Some(file)) => Ok(Some(Self::from_file(file)?)),
            (None, None) => Ok(None),
        }
    }

    /// Returns the URLs of one or more servers. An option must not contain a password, but the
    /// variable `name` and a file may. In the variable and in the file, lines that begin with # are
    /// comments. Fails if one of the three is set and contains no URL.
    pub fn find_urls(
        name: &str,
        option: Option<&str>,
        file: Option<&Path>,
    ) -> Result<Option<Self>, Failure> {
        let Some(option) = option.filter(|option| !option.is_empty()) else {
            let Some(text) = Self::find(name, file)? else {
                return Ok(None);
            };
            let lines: Vec<_> = lines(text.expose()).map(|(_, line)| line).collect();
            let urls = Self(Zeroizing::new(lines.join("\n")));
            return urls.with_urls(name).map(Some);
        };
        if file.is_some() {
            let text = format!(
                "the URL is set on the command line and in {name}_FILE: set only one of them"
            );
            return Err(Failure::configuration(text));
        }
        if split_urls(option).any(has_password) {
            return Err(Failure::usage(format!(
                "the URL contains a password, and other users of the machine can see the command line: \
                 put the URL into the variable {name}, or into a file that {name}_FILE names"
            )));
        }
        Self::of(option).with_urls(name).map(Some)
    }

    fn with_urls(self, name: &str) -> Result<Self, Failure> {
        if split_urls(self.expose()).next().is_none() {
            let text = format!("the option, variable or file of {name} contains no URL");
            return Err(Failure::configuration(text));
        }
        Ok(self)
    }
}

/// Returns the value of an environment variable; `None` if it is missing or blank. Fails if the
/// value is not UTF-8. If such a value were ignored, a server could start without its secret, and
/// accept every client.
pub fn variable(name: &str) -> Result<Option<String>, Failure> {
    match env::var(name) {
        Ok(value) => Ok(Some(value).filter(|value| !value.trim().is_empty())),
        Err(VarError::NotPresent) => Ok(None),
        // The error itself contains the value.
        Err(VarError::NotUnicode(_)) => Err(Failure::configuration(format!("{name} is not UTF-8"))),
    }
}

/// Returns the lines of a text without the blanks around them, and the number of each line. Skips
/// empty lines and comments, which begin with #.
pub fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = (1..).zip(text.lines().map(str::trim));
    lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

/// Splits a list of URLs at blanks and commas.
pub fn split_urls(text: &str) -> impl Iterator<Item = &str> {
    text.split([' ', ',', '\n', '\t', '\r'])
        .filter(|word| !word.is_empty())
}

/// The remedy for a URL for which [`is_ambiguous`] is true.
pub const ESCAPES: &str =
    "in the user and the password, write / as %2F, ? as %3F, # as %23, @ as %40 and , as %2C";

/// Returns whether a part of a password may have been parsed as another part of the URL, which a
/// message may show. This happens if the password contains a character that ends the authority, or
/// at which [`split_urls`] splits. For example, the port of `redis://me:12#34@db` is 12.
pub fn is_ambiguous(url: &str) -> bool {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.contains('@');
    };
    let is_web = scheme
        .get(..4)
        .is_some_and(|four| four.eq_ignore_ascii_case("http"));
    // In these schemes, the URL parser treats a backslash as a slash.
    let is_end = |c: char| matches!(c, '/' | '?' | '#') || (is_web && c == '\\');
    let (_, after) = rest.split_at(rest.find(is_end).unwrap_or(rest.len()));
    after.contains('@')
}

/// Returns whether a URL has a scheme, in capitals or not.
pub fn has_scheme(url: &str, scheme: &str) -> bool {
    let (given, _) = url.split_once("://").unwrap_or_default();
    given.eq_ignore_ascii_case(scheme)
}

/// Returns whether a URL contains a password, or a part that may be one.
pub fn has_password(url: &str) -> bool {
    if is_ambiguous(url) {
        return true;
    }
    match Url::parse(url) {
        Ok(url) => {
            url.password().is_some() || url.query_pairs().any(|(name, _)| name.contains("pass"))
        }
        // The parser does not accept a user without a host, as in `postgres://me@/shop?host=/tmp`.
        Err(_) => {
            let parts = url.split_once("://").and_then(|(scheme, rest)| {
                let (user, rest) = rest.split_once('@')?;
                Some((scheme, user, rest))
            });
            match parts {
                Some((scheme, user, rest)) if !user.contains(':') && rest.starts_with('/') => {
                    has_password(&format!("{scheme}://{rest}"))
                }
                _ => url.contains('@'),
            }
        }
    }
}

/// Returns the hosts and ports of URLs for messages.
pub fn addresses<'a>(urls: impl Iterator<Item = &'a str>) -> String {
    urls.map(address).collect::<Vec<_>>().join(", ")
}

/// Returns the host and the port of a URL, or the path of its socket, for messages.
pub fn address(url: &str) -> String {
    let parsed = Url::parse(url).ok().filter(|_| !is_ambiguous(url));
    let Some(url) = parsed else {
        return "?".into();
    };
    match (url.scheme(), url.host_str(), url.port()) {
        ("unix" | "redis+unix", ..) => url.path().to_owned(),
        (_, Some(host), Some(port)) => format!("{host}:{port}"),
        (_, Some(host), None) => host.to_owned(),
        (_, None, _) => "?".into(),
    }
}

/// Returns a setting without the blanks around it, or the default if the setting is blank.
pub fn or_default<'a>(setting: &'a str, default: &'a str) -> &'a str {
    match setting.trim() {
        "" => default,
        setting => setting,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn password_is_found_anywhere_in_a_url() {
        for url in [
            "postgres://me:pw@db/shop",
            "postgres://db/shop?password=pw",
            "rediss://:pw@cache",
            "postgres://me:p#w@db",
            "redis://me:12345#abc@127.0.0.1",
            "redis://:12345?abc@127.0.0.1",
            "redis://me:12345/abc@127.0.0.1",
            "http://me:12345\\abc@127.0.0.1",
            // A part of `redis://me:1,abc:2@db`.
            "abc:2@db",
            "abc:2@",
            "postgres://me:pw@/shop?host=/tmp",
            "postgres://me@/shop?host=/tmp&%70assword=pw",
        ] {
            assert!(has_password(url), "{url}");
        }
        for url in [
            "postgres://me@db/shop",
            "redis://cache:6379/2",
            "postgres:///shop",
            "postgres://me@/shop?host=/tmp",
        ] {
            assert!(!has_password(url), "{url}");
        }
    }

    #[test]
    fn address_contains_no_part_of_a_password() {
        for (url, shown) in [
            ("redis://me:12345#abc@db", "?"),
            ("redis://me:12345/abc@db:6379", "?"),
            ("redis://me:12%2345@db:6379/2", "db:6379"),
            ("redis://me:12\\345@db", "db"),
            ("https://[::1]:2379", "[::1]:2379"),
            (
                "redis+unix:///run/redis.sock?db=3&pass=12345",
                "/run/redis.sock",
            ),
        ] {
            assert_eq!(address(url), shown, "{url}");
        }
    }

    #[test]
    fn password_on_the_command_line_is_refused_and_not_repeated() {
        let urls = Some("redis://a, redis://:hunter2@b");
        let refused = Secret::find_urls("TEST_NONE", urls, None).unwrap_err();
        assert!(!refused.text.contains("hunter2"), "{}", refused.text);
        let found = Secret::find_urls("TEST_NONE", Some("redis://a, redis://b:7"), None);
        let found = found.unwrap().unwrap();
        assert_eq!(addresses(split_urls(found.expose())), "a, b:7");
        assert_eq!(format!("{found:?}"), "Secret(…)");
    }
}
