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
    if has_history && is_current(conn, &migrator).await? {
        return Ok(());
    }
    migrator.run_direct(None, conn, false).await
}

/// Whether all of these were applied; an error where the history does not fit to them. Nothing is written,
/// so that a role without the right to do so learns what is wrong.
async fn is_current(conn: &mut impl Migrate, migrator: &Migrator) -> Result<bool, MigrateError> {
    if let Some(version) = conn.dirty_version(HISTORY).await? {
        return Err(MigrateError::Dirty(version));
    }
    let applied = conn.list_applied_migrations(HISTORY).await?;
    for one in &applied {
        match migrator.iter().find(|known| known.version == one.version) {
            None => return Err(MigrateError::VersionMissing(one.version)),
            Some(known) if known.checksum != one.checksum => {
                return Err(MigrateError::VersionMismatch(one.version));
            }
            Some(_) => {}
        }
    }
    Ok(applied.len() == migrator.iter().count())
}
