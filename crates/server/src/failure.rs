//! The failure of a command: an exit status and a message.

use std::{error::Error, io, iter::successors, path::Path};

use sqlx::{error::DatabaseError, postgres::PgDatabaseError};
use tower_fence::{Resource, chain::Chain};

/// The command line is invalid (`EX_USAGE`).
pub const USAGE: u8 = 64;
/// A server does not answer (`EX_UNAVAILABLE`).
pub const UNAVAILABLE: u8 = 69;
/// The lease is held by another holder (`EX_TEMPFAIL`).
pub const HELD: u8 = 75;
/// The secret is rejected (`EX_NOPERM`).
pub const REFUSED: u8 = 77;
/// The configuration is invalid (`EX_CONFIG`).
pub const CONFIGURATION: u8 = 78;
/// The command exceeded `--max-time` and was stopped.
pub const TIME_UP: u8 = 123;
/// The lease was lost. The program `timeout` uses the same status for a timeout.
pub const LOST: u8 = 124;
/// The lease was lost, and processes of the command are still running.
pub const STILL_RUNNING: u8 = 125;
/// The command cannot be executed. Shells use this status, too.
pub const NOT_EXECUTABLE: u8 = 126;
/// The command was not found. Shells use this status, too.
pub const NOT_FOUND: u8 = 127;

/// Beginning of the text of a failure if the server of the leases does not answer.
pub const NO_ANSWER: &str = "no answer from the server";

/// The failure of a command.
#[derive(Debug)]
pub struct Failure {
    pub status: u8,
    pub text: String,
}

impl Failure {
    pub fn new(status: u8, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { status, text }
    }

    pub fn usage(text: impl Into<String>) -> Self {
        Self::new(USAGE, text)
    }

    pub fn configuration(text: impl Into<String>) -> Self {
        Self::new(CONFIGURATION, text)
    }

    pub fn unavailable(what: &str, error: &(dyn Error + 'static)) -> Self {
        Self::new(UNAVAILABLE, format!("{what}: {}", chain(error)))
    }

    pub fn other(text: impl Into<String>) -> Self {
        Self::new(1, text)
    }

    /// Returns the text, with a hint for operators if one is known. The library's own hints are for
    /// programmers.
    pub fn for_people(&self) -> String {
        let text = self
            .text
            .replace("call `Fence::migrate`", "run `tower-fence migrate`")
            .replace("Call `Fence::migrate`", "Run `tower-fence migrate`")
            .replace(
                "migrate without failover detection",
                "migrate with --no-failover-detection",
            );
        let hint = if text.starts_with(NO_ANSWER) && text.contains("refused") {
            "; start the server with `tower-fence serve`, or name another one with --url"
        } else if text.contains("permission denied for database \"") {
            // Postgres quotes the name only if the role lacks CONNECT.
            "; grant the role CONNECT on the database"
        } else if text.contains("permission denied for database") {
            "; grant the role CREATE on the database, or migrate as its owner"
        } else if text.contains("syntax error at or near") {
            "; if the name of the schema is a reserved keyword of SQL, choose another one with --database-schema"
        } else {
            ""
        };
        format!("{text}{hint}")
    }

    /// Creates the failure for a file that cannot be used.
    pub fn file(what: &str, path: &Path, error: impl std::fmt::Display) -> Self {
        Self::configuration(format!("{what} {}: {error}", path.display()))
    }
}

/// Formats an error with its causes and the hint of Postgres, without the prefixes of sqlx, which
/// do not help an operator.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let text = Chain(error)
        .to_string()
        .replace("while executing migrations: ", "the migration failed: ")
        .replace("error returned from database: ", "")
        .replace("error with configuration: ", "");
    match of_postgres(error).and_then(PgDatabaseError::hint) {
        Some(hint) => format!("{text}. {}", Chain(&io::Error::other(hint))),
        None => text,
    }
}

/// Returns the first error of Postgres among an error and its causes.
fn of_postgres<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e PgDatabaseError> {
    let mut causes = successors(Some(error), |error| (*error).source());
    // This is the source of `sqlx::Error::Database`.
    let refused = causes.find_map(|cause| cause.downcast_ref::<Box<dyn DatabaseError>>());
    refused?.try_downcast_ref()
}

/// Returns whether it is certain that a statement has changed nothing: the database is read-only,
/// or the statement timed out while it waited for a lock, or lost a deadlock.
pub fn is_refused(error: &(dyn Error + 'static)) -> bool {
    let certain = ["25006", "55P03", "40P01"];
    of_postgres(error).is_some_and(|refused| certain.contains(&refused.code()))
}

/// Formats an error like [`chain`], and escapes the name of this resource like [`shown`].
pub fn chain_on(error: &(dyn Error + 'static), resource: &Resource) -> String {
    let name = chain(&io::Error::other(resource.as_str()));
    let mut text = chain(error);
    for before in [" on ", " that "] {
        let [from, to] = [&name, &shown(resource.as_str())].map(|name| format!("{before}{name}"));
        text = text.replace(&from, &to);
    }
    text
}

/// Returns a name with its invisible characters and its backslashes escaped, so that different
/// names look different. Clients choose names, and characters that change the direction of text
/// could disguise a name. The console shows the same characters as code points.
pub fn shown(name: &str) -> String {
    let mut shown = String::new();
    let mut last = ' ';
    for (at, c) in name.char_indices() {
        let is_end = at + c.len_utf8() == name.len();
        match c {
            '"' | '\'' => shown.push(c),
            ' ' if last != ' ' && !is_end => shown.push(c),
            c if c == ' ' || is_ignored(c) => shown.extend(c.escape_unicode()),
            // A mark that combines with the previous character is visible.
            c if at > 0 => shown.extend(String::from_iter(['a', c]).escape_debug().skip(1)),
            c => shown.extend(c.escape_debug()),
        }
        last = c;
    }
    shown
}

/// Returns whether a character is invisible although Rust prints it: a character that is ignored by
/// default and is neither a format character nor unassigned, or the blank Braille pattern.
const fn is_ignored(c: char) -> bool {
    matches!(
        c,
        '\u{34f}'
            | '\u{115f}'
            | '\u{1160}'
            | '\u{17b4}'
            | '\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{2800}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{ffa0}'
            | '\u{e0100}'..='\u{e01ef}'
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tower_fence::lease::LeaseError;

    use super::*;

    #[test]
    fn only_invisible_characters_and_backslashes_are_escaped() {
        for name in ["sku-1", r#"it's "a" 'b'"#, "cafe\u{301} \u{1f431}", ""] {
            assert_eq!(shown(name), name);
        }
        for (name, expected) in [
            ("a\u{202e}txt.exe", r"a\u{202e}txt.exe"),
            (r"a\u{202e}txt.exe", r"a\\u{202e}txt.exe"),
            ("sku ", r"sku\u{20}"),
            (" sku", r"\u{20}sku"),
            ("a  b", r"a \u{20}b"),
            ("\u{301}a", r"\u{301}a"),
        ] {
            assert_eq!(shown(name), expected);
        }
        // No-break space, Hangul filler, variation selectors, combining grapheme joiner, blank
        // Braille pattern, byte order mark, tag, private use.
        for c in "\u{a0}\u{3164}\u{fe0f}\u{e0100}\u{34f}\u{2800}\u{feff}\u{e0041}\u{e000}".chars() {
            let expected = format!("sku{}", c.escape_unicode());
            assert_eq!(shown(&format!("sku{c}")), expected);
        }
    }

    #[test]
    fn name_in_an_error_is_shown() {
        for (name, expected) in [
            ("held ", r"held\u{20}"),
            ("a\u{202e}\u{3164}", r"a\u{202e}\u{3164}"),
        ] {
            let resource = Resource::new(name).unwrap();
            let held = LeaseError::held(&resource, Duration::ZERO);
            let expected = format!("the lease on {expected} is held by another holder");
            assert_eq!(chain_on(&held, &resource), expected);
        }
    }
}
