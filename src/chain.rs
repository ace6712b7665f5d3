//! Formatting of errors for the log.

#[cfg(feature = "postgres")]
use std::iter;
use std::{
    error::Error,
    fmt::{self, Write as _},
};

#[cfg(feature = "postgres")]
use sqlx::{error::DatabaseError, postgres::PgDatabaseError};

/// Error, formatted together with all its causes. If the text of an error already ends with the
/// text of its cause, the cause is omitted. The line number of Postgres' source code, which sqlx
/// adds to its errors, is removed. Characters that end a line or change the direction of text are
/// escaped.
///
/// The text may contain names and values that a client has sent. Log lines record the text with
/// `to_string()`, because the log quotes strings.
#[derive(Debug)]
pub struct Chain<'a>(pub &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = source_line(self.0);
        let text_of = |error: &dyn Error| match &line {
            Some(line) => error.to_string().replace(line, ""),
            None => error.to_string(),
        };
        let mut written = text_of(self.0);
        write_escaped(f, &written)?;
        let mut source = self.0.source();
        while let Some(cause) = source {
            let text = text_of(cause);
            if !written.ends_with(&text) {
                f.write_str(": ")?;
                write_escaped(f, &text)?;
            }
            written = text;
            source = cause.source();
        }
        Ok(())
    }
}

/// Returns whether a character ends a line or changes the direction of text.
pub(crate) fn is_deceptive(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}')
        || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Writes text, and escapes deceptive characters.
fn write_escaped(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    text.chars().try_for_each(|c| match is_deceptive(c) {
        true => write!(f, "{}", c.escape_default()),
        false => f.write_char(c),
    })
}

/// Returns the text that sqlx appends to the message of a Postgres error, such as ` at line 2939`.
/// The number is a line of the server's source code.
#[cfg(feature = "postgres")]
fn source_line(error: &dyn Error) -> Option<String> {
    let mut causes = iter::successors(error.source(), |&cause| cause.source());
    let error = causes.find_map(|cause| cause.downcast_ref::<Box<dyn DatabaseError>>())?;
    let error: &PgDatabaseError = error.try_downcast_ref()?;
    error.line().map(|line| format!(" at line {line}"))
}

#[cfg(not(feature = "postgres"))]
const fn source_line(_: &dyn Error) -> Option<String> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Level {
        #[error("the fence is unavailable")]
        Fence(#[source] Box<Level>),
        #[error("connecting failed: {0}")]
        Connect(#[source] Box<Level>),
        #[error("connection refused")]
        Refused,
    }

    #[test]
    fn each_cause_appears_once() {
        let error = Level::Fence(Level::Connect(Level::Refused.into()).into());
        let expected = "the fence is unavailable: connecting failed: connection refused";
        assert_eq!(Chain(&error).to_string(), expected);
    }

    #[test]
    fn text_of_a_client_cannot_imitate_another_line() {
        let error = std::io::Error::other("invalid integer: \"é\n1\u{2028}2\u{202e}3\"");
        let expected = r#"invalid integer: "é\n1\u{2028}2\u{202e}3""#;
        assert_eq!(Chain(&error).to_string(), expected);
    }
}
