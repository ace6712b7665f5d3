//! An error as a log shall have it: with all its causes.

use std::{error::Error, fmt};

/// An error with its causes, from the outermost to the root, for a log.
pub(crate) struct Causes<'a>(pub(crate) &'a (dyn Error + 'static));

impl fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{epochs::EpochError, lease::LeaseError};

    #[test]
    fn the_causes_are_written_down_to_the_root() {
        let root = std::io::Error::other("connection refused");
        let error = LeaseError::unavailable(EpochError::Unreachable(Box::new(root)));
        assert_eq!(
            Causes(&error).to_string(),
            "the lease store is unavailable: the source of epochs could not be reached: \
             connection refused"
        );
    }
}
