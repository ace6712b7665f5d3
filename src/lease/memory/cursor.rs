//! Where a page of a list begins.

use std::fmt;

use crate::lease::ListError;

/// A partition, and the name that was listed last of it.
#[derive(Default)]
pub(super) struct Cursor {
    pub(super) partition: u8,
    pub(super) after: String,
}

impl Cursor {
    pub(super) fn parse(text: &str) -> Result<Self, ListError> {
        let (partition, after) = text.split_once(':').ok_or(ListError::Cursor)?;
        Ok(Self {
            partition: partition.parse().map_err(|_| ListError::Cursor)?,
            after: after.to_owned(),
        })
    }
}

/// As [`Cursor::parse`] reads it.
impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.partition, self.after)
    }
}
