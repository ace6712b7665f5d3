//! Cursor of a page.

use std::fmt;

use crate::lease::ListError;

/// Cursor: a partition, and the last name that was listed in it.
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

/// Formats the cursor as [`Cursor::parse`] reads it.
impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.partition, self.after)
    }
}
