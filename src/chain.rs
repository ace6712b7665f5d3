//! Formatting of errors for the log.

#[cfg(feature = "postgres")]
use std::iter;
use std::{error::Error, fmt};

#[cfg(feature = "postgres")]
use sqlx::{error::DatabaseError, postgres::PgDatabaseError};

/// Error, formatted together with all its causes. If the text of an error already ends with the
/// text of its cause, the cause is omitted. The line number of Postgres' source code, which sqlx
/// adds to its errors, is removed.
pub(crate) struct Chain<'a>(pub(crate) &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = source_line(self.0);
        let text_of = |error: &dyn Error| match &line {
            Some(line) => error.to_string().replace(line, ""),
            None => error.to_string(),
        };
        let mut written = text_of(self.0);
        f.write_str(&written)?;
        let mut source = self.0.source();
        while let Some(cause) = source {
            let text = text_of(cause);
            if !written.ends_with(&text) {
                write!(f, ": {text}")?;
            }
            written = text;
            source = cause.source();
        }
        Ok(())
    }
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
}
