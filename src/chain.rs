//! Errors in logs.

use std::{error::Error, fmt};

/// An error with all its causes, one behind the other. A cause whose text the error before it has
/// repeated already is left out.
pub(crate) struct Chain<'a>(pub(crate) &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut written = self.0.to_string();
        f.write_str(&written)?;
        let mut source = self.0.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            if !written.ends_with(&text) {
                write!(f, ": {text}")?;
            }
            written = text;
            source = cause.source();
        }
        Ok(())
    }
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
    fn every_cause_is_there_once() {
        let error = Level::Fence(Level::Connect(Level::Refused.into()).into());
        let expected = "the fence is unavailable: connecting failed: connection refused";
        assert_eq!(Chain(&error).to_string(), expected);
    }
}
