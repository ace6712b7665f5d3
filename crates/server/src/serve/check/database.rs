//! The part of `check` that concerns Postgres.

use std::time::{SystemTime, UNIX_EPOCH};

use sqlx::{
    AssertSqlSafe, Connection, PgConnection, Postgres, Row,
    postgres::{PgConnectOptions, PgRow},
};
use tower_fence::{AdmitError, Fence};

use super::report::{Report, within};
use crate::{
    database::DatabaseArgs,
    failure::chain,
    migration::{Fences, fences},
};

/// The smallest difference between the clocks that is reported as a note, in seconds.
const NOTICEABLE: f64 = 1.0;
/// The oldest version that the fence supports, as `server_version_num`.
const OLDEST: u32 = 140_000;

/// Reads the properties of the database, in one statement that needs no privileges and also works
/// through a pooler.
const ABOUT: &str = "\
    SELECT pg_catalog.current_setting('server_version') AS version, \
        pg_catalog.current_setting('server_version_num') AS number, \
        pg_catalog.current_setting('server_encoding') AS encoding, \
        pg_catalog.current_setting('transaction_read_only') AS read_only, \
        current_user::text AS role, pg_catalog.pg_is_in_recovery()::text AS standby, \
        extract(epoch FROM pg_catalog.clock_timestamp())::text AS seconds, \
        concat(pg_catalog.current_database(), ' ', pg_catalog.pg_postmaster_start_time()) AS identity";

/// The use of the database, which determines the functions that a server needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needed {
    /// The leases are in Postgres.
    Leases,
    /// The leases are in another store.
    Epochs,
    /// The leases are in another store, and their grants are announced.
    EpochsAndAnnouncements,
}

impl Needed {
    /// Returns the functions that the role must be able to execute. The section "Roles" of the
    /// deployment guide lists the same functions.
    const fn functions(self) -> &'static [&'static str] {
        match self {
            Self::Leases => &[
                "lease_ask",
                "lease_call",
                "lease_end",
                "lease_listen",
                "lease_open",
                "lease_renew",
                "lease_sweep",
            ],
            Self::Epochs => &["next_epoch", "report_epoch"],
            Self::EpochsAndAnnouncements => &["announce", "catch_up", "next_epoch", "report_epoch"],
        }
    }
}

/// The properties of the database, and the number of seconds by which its clock is ahead of the
/// clock of this host.
struct About {
    row: PgRow,
    ahead: f64,
}

/// Reports on the database. Returns whether a grant can be tried.
pub async fn check(
    args: &DatabaseArgs,
    fence: &Fence<Postgres>,
    place: &str,
    needed: Needed,
    report: &mut Report,
) -> bool {
    let options = fence.pool().connect_options();
    let (mut conn, about) = match within(ask(&options)).await {
        Ok(answer) => answer,
        Err(error) => {
            report.problem("database", format!("cannot connect to {place}: {error}"));
            return false;
        }
    };
    let (version, role) = (about.text("version"), about.text("role"));
    let text = format!("{place}: Postgres {version}, role {role}");
    report.ok("database", text);
    clock(about.ahead, report);
    let unfit = about.unfit();
    let mut is_fit = unfit.is_none();
    if let Some(reason) = unfit {
        report.problem("database", reason);
    }
    let poolers = args.refuse_poolers(fence, place).await;
    is_fit &= poolers.is_ok();
    if report.take("pooler", poolers).is_some() {
        is_fit &= past_pooler(args, &about, report).await;
    }
    match fence.check().await {
        Ok(()) => report.ok(
            "tables",
            "the tables exist, and PUBLIC may execute no function",
        ),
        Err(error) => {
            let cause = match error {
                AdmitError::NotMigrated(cause) | AdmitError::Misconfigured(cause) => chain(&cause),
                error => chain(&error),
            };
            report.problem("tables", format!("{place}: {cause}"));
            is_fit = false;
        }
    }
    let schema = args.schema.name();
    match within(fences(&mut conn, schema)).await {
        Ok(found) => report_fences(found, schema, report),
        Err(error) => report.note("schema", format!("cannot read its owner: {error}")),
    }
    if is_fit {
        match within(missing(&mut conn, schema, needed.functions())).await {
            Ok(None) => {
                let text = format!("{role} may execute all functions that a grant calls");
                report.ok("rights", text);
            }
            Ok(Some(missing)) => {
                let text = format!("{role} lacks EXECUTE in the schema {schema} on {missing}");
                report.problem("rights", text);
            }
            Err(error) => report.note("rights", format!("cannot read the rights: {error}")),
        }
    }
    _ = conn.close().await;
    is_fit
}

/// Connects, and reads the properties of the database.
async fn ask(options: &PgConnectOptions) -> sqlx::Result<(PgConnection, About)> {
    let mut conn = PgConnection::connect_with(options).await?;
    let before = now();
    let row = sqlx::raw_sql(ABOUT).fetch_one(&mut conn).await?;
    let after = now();
    let theirs: String = row.try_get("seconds")?;
    // The database read its clock between `before` and `after`.
    let ahead = match theirs.parse::<f64>() {
        Ok(theirs) if theirs > after => theirs - after,
        Ok(theirs) if theirs < before => theirs - before,
        _ => 0.0,
    };
    Ok((conn, About { row, ahead }))
}

/// Returns the time of this host, in seconds since 1970.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

impl About {
    fn text(&self, column: &str) -> String {
        self.row.try_get(column).unwrap_or_default()
    }

    /// Returns the reason why a fence in this database cannot be written, if there is one.
    fn unfit(&self) -> Option<String> {
        let number = self.text("number").parse::<u32>();
        let encoding = self.text("encoding");
        if number.is_ok_and(|number| number < OLDEST) {
            Some("it is too old: Postgres 14 or later is required".into())
        } else if encoding != "UTF8" {
            Some(format!("its encoding is {encoding}, but must be UTF8"))
        } else if self.text("standby") == "true" {
            Some(
                "it is in recovery, and accepts no writes: set the URL of the primary, or end the recovery"
                    .into(),
            )
        } else if self.text("read_only") == "on" {
            Some("its transactions are read-only (default_transaction_read_only)".into())
        } else {
            None
        }
    }
}

fn clock(ahead: f64, report: &mut Report) {
    let (size, side) = (ahead.abs(), if ahead > 0.0 { "ahead of" } else { "behind" });
    if size < NOTICEABLE {
        report.ok(
            "clock",
            "the clock of the database is within 1 s of this host's clock",
        );
    } else {
        let text = format!(
            "the clock of the database is {size:.1} s {side} this host's clock, so the times of grants and of log lines differ"
        );
        report.note("clock", text);
    }
}

/// Reports whether a pooler is expected, and checks the URL that bypasses it. Returns whether a
/// grant can be tried.
async fn past_pooler(args: &DatabaseArgs, about: &About, report: &mut Report) -> bool {
    let expected = match args.transaction_pooling {
        true => "a pooler in transaction mode is expected",
        false => "no pooler in transaction mode",
    };
    report.ok("pooler", expected);
    let Some(listen) = report.take("listen-url", args.listen()) else {
        return false;
    };
    let Some(options) = listen else {
        if args.transaction_pooling {
            let text = "not set: waiters poll four times a second and are not served in order";
            report.note("listen-url", text);
        }
        return true;
    };
    let found = within(ask(&options)).await;
    let wrong = match &found {
        Ok((_, direct)) if direct.text("identity") == about.text("identity") => None,
        Ok(_) => Some("it does not point to the same database as the database URL".to_owned()),
        Err(error) => Some(format!("cannot connect: {error}")),
    };
    if let Ok((conn, _)) = found {
        _ = conn.close().await;
    }
    match wrong {
        None => {
            report.ok("listen-url", "it points to the same database");
            true
        }
        Some(wrong) => {
            report.problem("listen-url", wrong);
            false
        }
    }
}

fn report_fences(found: Fences, schema: &str, report: &mut Report) {
    let is_missing = found.owner.is_none();
    if let Some(owner) = found.owner {
        report.ok("schema", format!("{schema} belongs to the role {owner}"));
    }
    if let Some(others) = found.others {
        let text = match is_missing {
            true => format!(
                "this database has a fence in the schema {others}: `tower-fence migrate` would \
                 create an empty fence in the schema {schema}, which admits every token"
            ),
            false => format!("this database also has a fence in the schema {others}"),
        };
        report.note("schema", text);
    }
    if found.misses_failovers {
        let text = format!(
            "detection is off: call {schema}.after_failover() after each promotion and each restore"
        );
        report.note("failover", text);
    }
}

/// Returns the names of the given functions that the role is not allowed to execute.
async fn missing(
    conn: &mut PgConnection,
    schema: &str,
    functions: &[&str],
) -> sqlx::Result<Option<String>> {
    // The query is sent as text, because a pooler may be in between. The names need no quoting,
    // because they are plain identifiers.
    let sql = format!(
        "SELECT pg_catalog.string_agg(p.proname, ', ' ORDER BY p.proname) \
         FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace \
         WHERE n.nspname = '{schema}' AND p.proname = ANY ('{{{}}}') \
             AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE')",
        functions.join(",")
    );
    let sql = sqlx::raw_sql(AssertSqlSafe(sql));
    sql.fetch_one(conn).await?.try_get(0)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn checked_functions_match_the_documented_roles() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../src/deployment.md");
        let page = fs::read_to_string(page).unwrap();
        for (needed, role) in [
            (Needed::Leases, "shop_lessor"),
            (Needed::EpochsAndAnnouncements, "shop_issuer"),
        ] {
            let rights = page.lines().filter(|line| {
                line.starts_with("GRANT EXECUTE") && line.ends_with(&format!(" TO {role};"))
            });
            let mut listed: Vec<_> = rights
                .flat_map(|line| line.split([' ', ',', ';']))
                .filter_map(|word| word.strip_prefix("tower_fence."))
                // The deployment guide also lists `break_lease`, which only operators need.
                .filter(|name| *name != "break_lease")
                .collect();
            listed.sort_unstable();
            assert_eq!(listed, needed.functions(), "{role}");
        }
    }
}
