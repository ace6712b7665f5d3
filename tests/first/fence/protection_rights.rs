//! Protected tables and the roles that try to bypass them: rights, search paths, the bypass, and
//! dumps.

use std::process::{Command, Stdio};

use sqlx::Postgres;

use tower_fence::{AdmitError, Fence};

use super::protection::{admissions, is_unfenced, rows, run_admitted, with_tables};
use crate::support::{
    database::{Fresh, Role, TestDatabase, pool_of, read},
    fence::{resource, token, use_up},
    functions::{execute, refuses},
    postgres::{PostgresServer, programs},
};

const WRITE_A: &str =
    "UPDATE whole SET n = 0 WHERE sku = 'a'; UPDATE parts SET n = 0 WHERE sku = 'a'";

#[tokio::test]
async fn a_writer_needs_no_right_on_the_fence() {
    let db = with_tables().await;
    let rights = "GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON whole, parts TO {role}; \
         GRANT USAGE ON SEQUENCE tokens TO {role}";
    let role = db.role(rights).await;
    let (mut conn, role) = (role.connect().await, role.name);
    is_unfenced(&mut conn, WRITE_A, "whole", "a").await;
    is_unfenced(&mut conn, "TRUNCATE parts", "parts", "a").await;
    let admitted = format!("{}{WRITE_A}", admissions(["a"]));
    db.execute(&format!("GRANT USAGE ON SCHEMA tower_fence TO {role}"))
        .await;
    refuses(&mut conn, &admitted, "42501").await;
    let grant = format!("GRANT EXECUTE ON FUNCTION tower_fence.admit TO {role}");
    db.execute(&grant).await;
    run_admitted(&mut conn, ["a"], WRITE_A).await;
    // A role that may write has no further rights.
    for forbidden in [
        "SELECT tower_fence.bypass('it would be nice')",
        "INSERT INTO tower_fence.bypasses VALUES (pg_current_xact_id(), 'me', 'it would be nice', now())",
        "SELECT tower_fence.refuse_unfenced('a', 'b', 'c')",
        "SELECT tower_fence.protect('whole', '{id}')",
        "SELECT tower_fence.unprotect('whole')",
        "UPDATE tower_fence.resources SET admitted_by = pg_current_xact_id()",
        "ALTER TABLE whole DISABLE TRIGGER ALL",
        "SET session_replication_role = replica",
        "CREATE TEMPORARY TABLE mine (sku text); \
         CREATE TRIGGER mine AFTER INSERT ON mine REFERENCING NEW TABLE AS fence_new EXECUTE FUNCTION fence_guard_whole()",
    ] {
        refuses(&mut conn, &format!("{forbidden}; {WRITE_A}"), "42501").await;
    }
}

#[tokio::test]
async fn table_owner_may_protect_it_with_rights_on_the_fence() {
    let db = with_tables().await;
    // Applications often use such default privileges.
    let (reader, owner) = (db.role("").await.name, db.role("").await);
    let (mut conn, owner) = (owner.connect().await, owner.name);
    db.execute(&format!(
        "CREATE SCHEMA shop AUTHORIZATION {owner}; \
         ALTER DEFAULT PRIVILEGES FOR ROLE {owner} GRANT EXECUTE ON FUNCTIONS TO {reader}"
    ))
    .await;
    let protect = "SELECT tower_fence.protect('shop.own', '{sku}')";
    Postgres::run(&mut conn, "CREATE TABLE shop.own (sku text)").await;
    refuses(&mut conn, protect, "42501").await;
    db.execute(&format!(
        "GRANT USAGE ON SCHEMA tower_fence TO {owner}; \
         GRANT EXECUTE ON FUNCTION tower_fence.protect, tower_fence.unprotect, tower_fence.unprotectable, \
             tower_fence.pattern_parts, tower_fence.pattern_expression, tower_fence.column_beside, \
             tower_fence.guard_text TO {owner}; \
         GRANT SELECT ON tower_fence.protected_tables TO {owner}"
    ))
    .await;
    let refused = refuses(&mut conn, protect, "42501").await;
    assert_contains!(refused.message, "lacks privileges on the fence");
    // The hint contains the remedy.
    db.execute(&refused.hint).await;
    refuses(
        &mut conn,
        "SELECT tower_fence.protect('whole', '{sku}')",
        "42501",
    )
    .await;
    let is_owned = format!(
        "SELECT count(*) FROM pg_proc WHERE proname = 'fence_guard_own' AND proowner = '{owner}'::regrole \
         AND pronamespace = 'shop'::regnamespace AND prosecdef \
         AND NOT has_function_privilege('{reader}', oid, 'EXECUTE') AND NOT has_function_privilege('public', oid, 'EXECUTE')"
    );
    Postgres::run(&mut conn, protect).await;
    assert_eq!(db.number(&is_owned).await, 1);
    let insert = "INSERT INTO shop.own VALUES ('a')";
    let refused = refuses(&mut conn, insert, "TF428").await;
    assert!(
        refused.message.starts_with("shop.own is written"),
        "{refused:?}"
    );
    // The owner may remove the protection. If a superuser protects the table, the guard still has
    // the owner's rights.
    Postgres::run(&mut conn, "SELECT tower_fence.unprotect('shop.own')").await;
    Postgres::run(&mut conn, insert).await;
    db.execute(protect).await;
    assert_eq!(db.number(&is_owned).await, 1);

    // Policies hide rows from the guard.
    let hide = "ALTER TABLE shop.own ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY";
    Postgres::run(&mut conn, hide).await;
    let truncate = "TRUNCATE shop.own";
    let refused = refuses(&mut conn, truncate, "42501").await;
    assert_contains!(refused.hint, "NO FORCE ROW LEVEL SECURITY");
    let remedy = "ALTER TABLE shop.own NO FORCE ROW LEVEL SECURITY";
    Postgres::run(&mut conn, remedy).await;
    refuses(&mut conn, truncate, "TF428").await;
}

/// Statements that create tables and operators of the writer, and a search path on which these come
/// first.
const ASTRAY: &str = "
    CREATE SCHEMA astray;
    CREATE FUNCTION astray.yes(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
    CREATE FUNCTION astray.no(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT false';
    CREATE FUNCTION astray.yes(xid8, xid8) RETURNS boolean LANGUAGE sql AS 'SELECT true';
    CREATE FUNCTION astray.age(xid) RETURNS integer LANGUAGE sql AS 'SELECT 0';
    CREATE OPERATOR astray.= (LEFTARG = text, RIGHTARG = text, FUNCTION = astray.yes);
    CREATE OPERATOR astray.= (LEFTARG = xid8, RIGHTARG = xid8, FUNCTION = astray.yes);
    CREATE TABLE astray.resources (LIKE tower_fence.resources);
    CREATE TEMPORARY TABLE resources (LIKE tower_fence.resources);
    CREATE TEMPORARY TABLE fence_new AS TABLE whole WITH NO DATA;
    CREATE TEMPORARY TABLE fence_old AS TABLE whole WITH NO DATA;
    SET search_path = astray, pg_temp, pg_catalog, public;
";

#[tokio::test]
async fn search_paths_and_temporary_tables_mislead_no_guard() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    run_admitted(&mut conn, ["a"], WRITE_A).await;
    Postgres::run(&mut conn, ASTRAY).await;
    let write = "UPDATE whole SET n = 0 WHERE id OPERATOR(pg_catalog.=) 1; \
         UPDATE parts SET n = 0 WHERE id OPERATOR(pg_catalog.=) 1";
    for first in ["", &admissions(["b"])] {
        is_unfenced(&mut conn, &format!("{first}{write}"), "whole", "a").await;
    }
    run_admitted(&mut conn, ["a"], write).await;
}

#[tokio::test]
async fn session_in_replica_role_is_refused() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let replica = format!("SET LOCAL session_replication_role = replica; {WRITE_A}");
    is_unfenced(&mut conn, &replica, "whole", "a").await;
}

#[tokio::test]
async fn bypass_needs_a_reason_and_ends_with_its_transaction() {
    let server = PostgresServer::start(&["fsync=off"]).await;
    let mut conn = server.connect().await;
    let pool = pool_of(&server.url("postgres"), 1).await;
    Fence::new(pool).migrate().await.unwrap();
    Postgres::run(&mut conn, super::protection::TABLES).await;
    let bypass = "SELECT tower_fence.bypass('stock was counted')";
    for allowed in [
        format!("{bypass}; {WRITE_A}; DELETE FROM parts; TRUNCATE whole"),
        format!("{bypass}; SELECT tower_fence.bypass('again'); DELETE FROM parts"),
        format!("SAVEPOINT s; {bypass}; RELEASE s; DELETE FROM parts"),
    ] {
        Postgres::run(&mut conn, &format!("BEGIN; {allowed}; ROLLBACK")).await;
    }
    run_admitted(&mut conn, [], &format!("{bypass}; {WRITE_A}")).await;
    for refused in [
        WRITE_A.to_owned(),
        format!("{bypass}; COMMIT; BEGIN; {WRITE_A}"),
        format!("SAVEPOINT s; {bypass}; ROLLBACK TO s; {WRITE_A}"),
    ] {
        is_unfenced(&mut conn, &refused, "whole", "a").await;
    }
    for malformed in ["NULL", "''", "'  '", "E'two\\nlines'", "repeat('x', 1001)"] {
        let bypass = format!("SELECT tower_fence.bypass({malformed})");
        refuses(&mut conn, &bypass, "22023").await;
    }
    let kept = "SELECT count(*) FROM tower_fence.bypasses \
         WHERE role = 'tests' AND reason = 'stock was counted'";
    assert_ne!(Postgres::number(&mut conn, kept).await.unwrap(), 0);
    for act in [
        "raise('a', 9)",
        "reset('a', 5)",
        "after_failover()",
        "notice_failover(true)",
    ] {
        Postgres::run(&mut conn, &format!("SELECT tower_fence.{act}")).await;
    }
    let log: String = read(&mut conn, "SELECT pg_read_file('../server.log')").await;
    for act in [
        "bypasses protected tables: stock was counted",
        "resets a to 5, before: 8",
        "calls after_failover(1)",
        "calls notice_failover(true)",
    ] {
        assert_contains!(log, &format!("LOG:  tower-fence: tests {act}"));
    }
    assert!(!log.contains("nextval"));

    // The record names the role that has called the function, not the owner of the function.
    let by_another = format!(
        "CREATE ROLE counter; GRANT USAGE ON SCHEMA tower_fence TO counter; \
         GRANT EXECUTE ON FUNCTION tower_fence.bypass TO counter; \
         SET SESSION AUTHORIZATION counter; {bypass}; RESET SESSION AUTHORIZATION"
    );
    Postgres::run(&mut conn, &by_another).await;
    let kept = "SELECT count(*) FROM tower_fence.bypasses WHERE role = 'counter'";
    assert_eq!(Postgres::number(&mut conn, kept).await.unwrap(), 1);

    // Records are kept for a year.
    let age = "UPDATE tower_fence.bypasses SET begun_at = now() - interval '363 days'";
    Postgres::run(&mut conn, age).await;
    Postgres::run(&mut conn, bypass).await;
    assert_eq!(Postgres::number(&mut conn, kept).await.unwrap(), 1);
    let age = "UPDATE tower_fence.bypasses SET begun_at = now() - interval '367 days'";
    Postgres::run(&mut conn, age).await;
    Postgres::run(&mut conn, bypass).await;
    let left = "SELECT count(*) FROM tower_fence.bypasses";
    assert_eq!(Postgres::number(&mut conn, left).await.unwrap(), 1);
}

/// Runs a program of Postgres on this database, and returns its output.
fn run(program: &str, url: &str, arguments: &[&str]) -> String {
    let programs = programs().expect("postgresql is not installed");
    let output = Command::new(programs.join(program))
        .args(["--dbname", url])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let [printed, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{errors}");
    printed
}

/// Dumps a database with these options, and restores the dump in another database.
async fn restored(db: &Fresh<Postgres>, options: &[&str]) -> Fresh<Postgres> {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump.sql");
    std::fs::write(&dump, run("pg_dump", &db.url, options)).unwrap();
    let restored = Postgres::fresh(2).await;
    restored
        .execute(
            "DROP SCHEMA tower_fence, public CASCADE; CREATE SCHEMA public; \
             GRANT USAGE ON SCHEMA public TO PUBLIC",
        )
        .await;
    let dump = dump.to_str().unwrap();
    let script = ["--no-psqlrc", "-v", "ON_ERROR_STOP=1", "-f", dump];
    run("psql", &restored.url, &script);
    restored
}

#[tokio::test]
async fn a_dump_keeps_the_protection_and_restores_no_admission() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let protect = "SELECT tower_fence.protect('whole', 'it''s {sku}%')";
    Postgres::run(&mut conn, protect).await;
    run_admitted(&mut conn, ["a", "it''s a%"], WRITE_A).await;
    let restored = restored(&db, &[]).await;
    let mut copy = restored.pool.acquire().await.unwrap();
    for table in ["whole", "parts", "tower_fence.protected_tables"] {
        assert_eq!(rows(&mut copy, table).await, rows(&mut conn, table).await);
    }
    let enabled = "tower_fence.protected_tables WHERE enabled = 'A'";
    assert_eq!(restored.count(enabled).await, 15);
    is_unfenced(&mut copy, WRITE_A, "whole", "it's a%").await;
    run_admitted(&mut copy, ["a", "it''s a%"], WRITE_A).await;

    // The restored server uses the same transaction ids again.
    assert!(!comes_round(&restored).await);
    for function in ["fence_guard_whole", "tower_fence.refuse_unfenced"] {
        let text = format!("SELECT pg_get_functiondef('{function}'::regproc)");
        let text: String = read(&mut *copy, &text).await;
        let careless = text
            .replace("age(f.xmin) <= 0", "true")
            .replace("age(b.xmin) <= 0", "true");
        assert_ne!(careless, text);
        Postgres::run(&mut copy, &careless).await;
        assert!(
            comes_round(&restored).await,
            "without the age check, no old admission allowed a write, so the test proves nothing"
        );
        Postgres::run(&mut copy, &text).await;
    }
}

/// Whether a transaction can write if its id is that of an old admission and of an old bypass.
async fn comes_round(db: &Fresh<Postgres>) -> bool {
    let mut conn = db.pool.acquire().await.unwrap();
    loop {
        // This transaction id is reached soon, whichever sessions begin the transactions before it.
        let next = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 20";
        let next = Postgres::number(&mut conn, next).await.unwrap();
        let old = format!(
            "UPDATE tower_fence.resources SET admitted_by = '{next}'; DELETE FROM tower_fence.bypasses; \
             INSERT INTO tower_fence.bypasses VALUES ('{next}', 'me', 'then', now())"
        );
        Postgres::run(&mut conn, &old).await;
        loop {
            Postgres::run(&mut conn, "BEGIN").await;
            let number = "SELECT pg_current_xact_id()::text::bigint";
            let number = Postgres::number(&mut conn, number).await.unwrap();
            if number == next {
                let write = "UPDATE whole SET n = 5 WHERE sku = 'a'";
                Postgres::run(&mut conn, "SAVEPOINT s").await;
                let written = execute(&mut conn, write).await;
                Postgres::run(&mut conn, "ROLLBACK TO s").await;
                // A bypass of this transaction replaces the old one.
                let bypass = format!("SELECT tower_fence.bypass('now'); {write}");
                Postgres::run(&mut conn, &bypass).await;
                Postgres::run(&mut conn, "ROLLBACK").await;
                return written.is_ok();
            }
            Postgres::run(&mut conn, "COMMIT").await;
            if number > next {
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_dump_without_rights_opens_no_function() {
    let db = with_tables().await;
    let restored = restored(&db, &["--no-acl", "--no-owner"]).await;
    let rights = "GRANT USAGE ON SCHEMA tower_fence TO {role}";
    let stranger = restored.role(rights).await;
    let mut conn = stranger.connect().await;
    run_admitted(&mut conn, [], "SELECT tower_fence.bypass('as anybody may')").await;

    let name = resource("a");
    let begun = use_up(&restored.fence(), &name, token(1)).await;
    let Err(AdmitError::Misconfigured(cause)) = begun else {
        panic!("a fence that is open to PUBLIC admits: {begun:?}");
    };
    let cause = cause.to_string();
    for function in [" admit, ", " bypass, ", " raise, ", " fence_guard_whole, "] {
        assert_contains!(cause, function);
    }
    // A role other than the owner gets an error with the reason.
    let Role { name: role, .. } = &stranger;
    let grant = format!("GRANT SELECT ON tower_fence.migrations TO {role}");
    restored.execute(&grant).await;
    let pool = stranger.pool().await;
    let refused = Fence::new(pool.clone()).migrate().await.unwrap_err();
    assert_contains!(refused.to_string(), "PUBLIC may execute");
    pool.close().await;

    let fence = restored.fence();
    fence.migrate().await.unwrap();
    fence.check().await.unwrap();
    use_up(&fence, &name, token(1)).await.unwrap();
    for forbidden in [
        "SELECT tower_fence.bypass('it would be nice')",
        "SELECT tower_fence.break_lease('a')",
        "SELECT tower_fence.raise('a', 999999999999999)",
        "SELECT tower_fence.notice_failover(false)",
        "CREATE TEMPORARY TABLE mine (sku text); \
         CREATE TRIGGER mine AFTER INSERT ON mine REFERENCING NEW TABLE AS fence_new EXECUTE FUNCTION fence_guard_whole()",
    ] {
        refuses(&mut conn, forbidden, "42501").await;
    }
}

#[tokio::test]
async fn tables_with_policies_are_protected_too() {
    let db = with_tables().await;
    let change = "ALTER TABLE whole ENABLE ROW LEVEL SECURITY; ALTER TABLE parts ENABLE ROW LEVEL SECURITY; \
         CREATE POLICY seen ON whole USING (sku <> 'b'); CREATE POLICY seen ON parts USING (sku <> 'b'); \
         GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON whole, parts TO {role}; \
         GRANT USAGE ON SEQUENCE tokens TO {role}; GRANT USAGE ON SCHEMA tower_fence TO {role}; \
         GRANT EXECUTE ON FUNCTION tower_fence.admit TO {role}";
    let mut conn = db.role(change).await.connect().await;
    for force in [false, true] {
        for (table, written) in [("whole", "whole"), ("parts", "part_1")] {
            if force {
                db.execute(&format!("ALTER TABLE {table} FORCE ROW LEVEL SECURITY"))
                    .await;
            }
            let write = format!("UPDATE {table} SET n = n + 1 WHERE sku < 'c'");
            is_unfenced(&mut conn, &write, written, "a").await;
            // A row that the policy hides is not written, and needs no admission.
            run_admitted(&mut conn, ["a"], &write).await;
            let hidden = format!("SELECT n::bigint FROM {table} WHERE sku = 'b'");
            assert_eq!(db.number(&hidden).await, 3);
            // TRUNCATE ignores policies. Unless the guard sees each row, no row may be removed.
            let truncate = format!("{}TRUNCATE {table}", admissions(["a", "c"]));
            refuses(&mut conn, &truncate, "TF428").await;
        }
    }
}
