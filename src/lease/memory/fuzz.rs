//! Entry points for the fuzz targets of this store.

use super::cursor::Cursor;

/// Parses a cursor and formats the result.
pub(crate) fn cursor(text: &str) -> Option<String> {
    Cursor::parse(text).ok().map(|cursor| cursor.to_string())
}
