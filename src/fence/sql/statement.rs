//! Single-statement writes of the application.

use derive_where::derive_where;
use sqlx::{Database, Execute, SqlStr};

use super::{Admit, Arguments, On};
use crate::fence::error::WriteError;

/// Writes of the application that consist of one statement.
#[trait_variant::make(Send)]
pub(crate) trait SingleStatements: Database<Arguments: Clone> {
    /// Admits a token and runs the given statement, both in one statement that commits by itself.
    /// If no row is returned, nothing was changed, whatever the reason is. Only a database with a
    /// server can combine the two statements.
    fn write_single(
        _: On<'_, Self>,
        _: Admit<'_>,
        _: &mut Statement<Self>,
    ) -> impl Future<Output = sqlx::Result<Vec<Self::Row>>> {
        async { Ok(Vec::new()) }
    }

    /// Runs a single-statement write in a transaction in which the token is already admitted.
    async fn write_admitted(
        conn: &mut Self::Connection,
        statement: &mut Statement<Self>,
    ) -> sqlx::Result<Vec<Self::Row>>;
}

/// Statement that writes and returns rows, with its arguments. Functions borrow it mutably, because
/// sqlx does not guarantee that arguments are `Sync`.
#[derive_where(Clone; DB::Arguments)]
pub(crate) struct Statement<DB: Database> {
    pub(super) sql: SqlStr,
    pub(super) arguments: DB::Arguments,
}

impl<DB: Database> Statement<DB> {
    pub(crate) fn new<'q>(mut query: impl Execute<'q, DB>) -> Result<Self, WriteError> {
        let arguments = query
            .take_arguments()
            .map_err(|error| WriteError::statement(sqlx::Error::Encode(error)))?;
        let sql = query.sql();
        // Check this here, so that the first call reports a missing `fence`. Otherwise the mistake
        // would appear only at the first write with a stale token.
        if !sql.as_str().to_ascii_lowercase().contains("fence") {
            return Err(WriteError::Independent);
        }
        let arguments = arguments.unwrap_or_default();
        // The fence appends its own arguments, which must not take the position of a missing
        // argument.
        let (bound, named) = (arguments.len(), highest_placeholder(sql.as_str()));
        if named > bound {
            let missing =
                format!("the statement has ${named}, but only {bound} arguments are bound");
            return Err(WriteError::statement(sqlx::Error::Encode(missing.into())));
        }
        Ok(Self { sql, arguments })
    }
}

/// Returns the highest number after a `$`.
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
    fn highest_placeholder_is_found_at_any_position() {
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
