//! What the fuzz targets reach of this store.

use super::cursor::Cursor;

/// Reads a cursor, and writes what was read.
pub(crate) fn cursor(text: &str) -> Option<String> {
    Cursor::parse(text).ok().map(|cursor| cursor.to_string())
}
