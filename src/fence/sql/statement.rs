//! A statement of the application's that writes by itself, together with its admission.

use sqlx::{Database, Execute, SqlStr};

use super::Arguments;
use crate::fence::error::WriteError;

/// A statement that writes and returns rows, and what is bound to it. Borrowed mutably only, since
/// sqlx does not promise that arguments are `Sync`.
pub(crate) struct Statement<DB: Database> {
    pub(super) sql: SqlStr,
    pub(super) arguments: DB::Arguments,
}

impl<DB: Database> Clone for Statement<DB>
where
    DB::Arguments: Clone,
{
    fn clone(&self) -> Self {
        Self {
            sql: self.sql.clone(),
            arguments: self.arguments.clone(),
        }
    }
}

impl<DB: Database> Statement<DB> {
    /// Takes a query of sqlx apart.
    pub(crate) fn new<'q>(mut query: impl Execute<'q, DB>) -> Result<Self, WriteError> {
        let arguments = query
            .take_arguments()
            .map_err(|error| WriteError::statement(sqlx::Error::Encode(error)))?;
        let sql = query.sql();
        // Told at the first try, and not by the first stale token that writes.
        if !sql.as_str().to_ascii_lowercase().contains("fence") {
            return Err(WriteError::Independent);
        }
        let arguments = arguments.unwrap_or_default();
        // The fence's own arguments come behind these, and must not take the place of one.
        let (bound, named) = (arguments.len(), highest_placeholder(sql.as_str()));
        if named > bound {
            let missing =
                format!("the statement has ${named}, but only {bound} arguments are bound");
            return Err(WriteError::statement(sqlx::Error::Encode(missing.into())));
        }
        Ok(Self { sql, arguments })
    }
}

/// The highest number that stands behind a `$`.
fn highest_placeholder(sql: &str) -> usize {
    let behind = sql.split('$').skip(1);
    let numbers = behind.filter_map(|text| {
        let digits = text.find(|next: char| !next.is_ascii_digit());
        text[..digits.unwrap_or(text.len())].parse().ok()
    });
    numbers.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_placeholder_is_found_wherever_it_stands() {
        for (sql, highest) in [
            ("SELECT 1", 0),
            ("SELECT $1", 1),
            ("SELECT $12, $2::text, '$', $x", 12),
            ("SELECT $$3$$", 3),
        ] {
            assert_eq!(highest_placeholder(sql), highest, "{sql}");
        }
    }
}
