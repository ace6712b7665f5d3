//! Migrations of the fence's own tables, with a migration history that is separate from the
//! application's.

use sqlx::migrate::{Migrate, MigrateError, Migration, MigrationType, Migrator};

use super::Names;

const HISTORY: &str = "tower_fence.migrations";

type Step = (i64, &'static str, &'static str);

#[cfg(feature = "postgres")]
#[rustfmt::skip]
pub(super) const POSTGRES: &[Step] = &[
    (1, "fence", include_str!("../../../migrations/postgres/0001_fence.sql")),
    (2, "leases", include_str!("../../../migrations/postgres/0002_leases.sql")),
    (3, "protect", include_str!("../../../migrations/postgres/0003_protect.sql")),
    (4, "citus", include_str!("../../../migrations/postgres/0004_citus.sql")),
];

#[cfg(feature = "sqlite")]
#[rustfmt::skip]
pub(super) const SQLITE: &[Step] =
    &[(1, "fence", include_str!("../../../migrations/sqlite/0001_fence.sql"))];

/// Returns the migrations, with the names of this database.
fn migrations(names: &Names, steps: &'static [Step]) -> impl Iterator<Item = Migration> {
    steps.iter().map(|&(version, name, sql)| {
        let sql = names.sql(sql);
        Migration::new(version, name.into(), MigrationType::Simple, sql, false)
    })
}

/// Returns all migrations as one script, which also writes the same history as the migrator.
/// `history` contains the columns of the history table, as sqlx creates it on that database.
/// `bytes` contains the text before and after the hexadecimal digits in a literal of bytes. Each
/// migration begins with the statements `first`.
pub(super) fn script(
    names: &Names,
    steps: &'static [Step],
    history: &str,
    bytes: [&str; 2],
    first: &str,
) -> String {
    let table = names.apply(HISTORY);
    let mut script = format!(
        "-- The schema of tower-fence {}. Apply it in one transaction.\n\n\
         CREATE TABLE {table} (\n{history}\n);\n",
        env!("CARGO_PKG_VERSION"),
    );
    for one in migrations(names, steps) {
        let (version, name, sql) = (one.version, &one.description, one.sql.as_str().trim_end());
        let digits: String = one
            .checksum
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let [before, behind] = bytes;
        script.push_str(&format!(
            "\n-- Version {version}: {name}\n\n{first}{sql}\n\n\
             INSERT INTO {table} (version, description, success, checksum, execution_time)\n\
             VALUES ({version}, '{name}', true, {before}{digits}{behind}, -1);\n"
        ));
    }
    script
}

/// State of the tables, compared with the migrations of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableState {
    /// The tables are missing, or a migration has not been applied.
    Outdated,
    /// Each migration has been applied.
    Current,
    /// A newer version has migrated. Its tables support this version.
    Newer,
}

/// Updates the tables. If the history shows that they are current or newer, writes nothing, and
/// needs no privilege to create objects. Returns the state in which this function has found them.
pub(super) async fn migrate(
    conn: &mut impl Migrate,
    has_history: bool,
    names: &Names,
    steps: &'static [Step],
) -> Result<TableState, MigrateError> {
    let mut migrator = Migrator::with_migrations(migrations(names, steps).collect());
    let table = names.apply(HISTORY);
    migrator.dangerous_set_table_name(table.clone());
    let found = match has_history {
        true => compare(conn, &migrator, &table).await?,
        false => TableState::Outdated,
    };
    if found == TableState::Outdated {
        migrator.run_direct(None, conn, false).await?;
    }
    Ok(found)
}

/// Compares the history with the migrations. Returns an error if they do not match. This function
/// only reads, so that a role without the privilege to write also gets the error.
async fn compare(
    conn: &mut impl Migrate,
    migrator: &Migrator,
    table: &str,
) -> Result<TableState, MigrateError> {
    if let Some(version) = conn.dirty_version(table).await? {
        return Err(MigrateError::Dirty(version));
    }
    let applied = conn.list_applied_migrations(table).await?;
    let last = migrator.iter().map(|known| known.version).max();
    let mut newer = None;
    for one in &applied {
        match migrator.iter().find(|known| known.version == one.version) {
            None if Some(one.version) > last => newer = Some(one.version),
            None => return Err(MigrateError::VersionMissing(one.version)),
            Some(known) if known.checksum != one.checksum => {
                return Err(MigrateError::VersionMismatch(one.version));
            }
            Some(_) => {}
        }
    }
    let is_complete = migrator
        .iter()
        .all(|known| applied.iter().any(|one| one.version == known.version));
    match (is_complete, newer) {
        (true, None) => Ok(TableState::Current),
        (true, Some(_)) => Ok(TableState::Newer),
        (false, None) => Ok(TableState::Outdated),
        (false, Some(newer)) => Err(MigrateError::VersionMissing(newer)),
    }
}
