//! The migrations of the fence's own tables, with a history of their own beside the application's.

use sqlx::{
    SqlSafeStr,
    migrate::{Migrate, MigrateError, Migration, MigrationType, Migrator},
};

/// Where the history is kept.
const HISTORY: &str = "_tower_fence_migrations";

/// A version, a name, and what it does.
type Step = (i64, &'static str, &'static str);

macro_rules! steps {
    ($database:literal: $($number:literal, $version:literal, $name:literal;)*) => {
        &[$((
            $version,
            $name,
            include_str!(concat!(
                "../../../migrations/", $database, "/", $number, "_", $name, ".sql"
            )),
        ),)*]
    };
}

#[cfg(feature = "postgres")]
pub(super) const POSTGRES: &[Step] = steps! {
    "postgres":
    "0001", 1, "fence";
    "0002", 2, "idempotency";
    "0003", 3, "announcements";
    "0004", 4, "functions";
    "0005", 5, "floors";
    "0006", 6, "protection";
    "0007", 7, "leases";
    "0008", 8, "failover";
    "0009", 9, "signed";
    "0010", 10, "removal";
    "0011", 11, "partitions";
};

#[cfg(feature = "sqlite")]
pub(super) const SQLITE: &[Step] = steps! {
    "sqlite":
    "0001", 1, "fence";
    "0002", 2, "idempotency";
    "0003", 3, "announcements";
    "0004", 4, "floors";
};

fn migrations(steps: &'static [Step]) -> impl Iterator<Item = Migration> {
    steps.iter().map(|&(version, name, sql)| {
        let sql = sql.into_sql_str();
        Migration::new(version, name.into(), MigrationType::Simple, sql, false)
    })
}

/// All of it as one script, with the history as the migrator would have written it. `history` makes its
/// table, as sqlx does on that database, and `bytes` is a literal of bytes there, around hexadecimal digits.
pub(super) fn script(steps: &'static [Step], history: &str, bytes: [&str; 2]) -> String {
    let mut script = format!(
        "-- The schema of tower-fence {}. Apply it in one transaction.\n\n\
         CREATE TABLE {HISTORY} (\n{history}\n);\n",
        env!("CARGO_PKG_VERSION"),
    );
    for one in migrations(steps) {
        let (version, name, sql) = (one.version, &one.description, one.sql.as_str().trim_end());
        let digits: String = one
            .checksum
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let [before, behind] = bytes;
        script.push_str(&format!(
            "\n-- Version {version}: {name}\n\n{sql}\n\n\
             INSERT INTO {HISTORY} (version, description, success, checksum, execution_time)\n\
             VALUES ({version}, '{name}', true, {before}{digits}{behind}, -1);\n"
        ));
    }
    script
}

/// Brings the tables up to date. Where they are, by a history that is there, nothing is written, and no
/// right to create anything is needed.
pub(super) async fn migrate(
    conn: &mut impl Migrate,
    has_history: bool,
    steps: &'static [Step],
) -> Result<(), MigrateError> {
    let mut migrator = Migrator::with_migrations(migrations(steps).collect());
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
