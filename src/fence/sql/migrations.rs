//! The migrations of the fence's own tables, with a history of their own beside the application's.

use sqlx::{
    SqlSafeStr,
    migrate::{Migrate, MigrateError, Migration, MigrationType, Migrator},
};

/// Where the history is kept.
const HISTORY: &str = "_tower_fence_migrations";

/// Brings the tables up to date. Where they are, by a history that is there, nothing is written, and no
/// right to create anything is needed.
pub(super) async fn migrate(
    conn: &mut impl Migrate,
    has_history: bool,
    migrations: impl IntoIterator<Item = (i64, &'static str, &'static str)>,
) -> Result<(), MigrateError> {
    let migrations = migrations.into_iter().map(|(version, name, sql)| {
        let sql = sql.into_sql_str();
        Migration::new(version, name.into(), MigrationType::Simple, sql, false)
    });
    let mut migrator = Migrator::with_migrations(migrations.collect());
    migrator.dangerous_set_table_name(HISTORY);
    if has_history && is_current(conn, &migrator).await {
        return Ok(());
    }
    migrator.run_direct(None, conn, false).await
}

/// Whether all of these were applied, as they are, and no others. Not so where that cannot be told:
/// the migrator then says why.
async fn is_current(conn: &mut impl Migrate, migrator: &Migrator) -> bool {
    let (Ok(None), Ok(applied)) = (
        conn.dirty_version(HISTORY).await,
        conn.list_applied_migrations(HISTORY).await,
    ) else {
        return false;
    };
    let expected = migrator.iter().map(|one| (one.version, &one.checksum));
    applied
        .iter()
        .map(|one| (one.version, &one.checksum))
        .eq(expected)
}
