//! Attempts to bypass protected tables, and the rights that a migration revokes from roles that
//! have them by default.

use serde_json::json;
use sqlx::{Connection, PgConnection, Postgres};

use crate::support::{
    database::{Fresh, TestDatabase},
    functions::{admit, execute, is_refused, refuses},
    log::Log,
};

use super::protection::{admissions, is_unfenced, run_admitted, with_tables};

/// Returns a database with a table that has a column of each kind of type, protected by a pattern.
async fn protected(pattern: &str) -> sqlx::Result<Fresh<Postgres>> {
    let db = Postgres::fresh(2).await;
    db.execute(
        "CREATE TYPE colour AS ENUM ('red'); CREATE DOMAIN nick AS text CHECK (VALUE <> ''); \
         CREATE DOMAIN short_nick AS nick; CREATE DOMAIN paint AS colour; CREATE DOMAIN birthday AS date; \
         CREATE TYPE pair AS (a int, b int); \
         CREATE TABLE item (sku text, place varchar(9), tiny smallint, count integer, number bigint, id uuid, \
             is_new boolean, colour colour, nick short_nick, paint paint, \
             code char(4), price numeric, size float8, day date, at timestamptz, lasts interval, raw bytea, \
             tags text[], doc jsonb, pair pair, birthday birthday, name name)",
    )
    .await;
    let protect = sqlx::query("SELECT tower_fence.protect('item', $1)").bind(pattern);
    protect.execute(&db.pool).await?;
    Ok(db)
}

#[track_caller]
fn code<T: std::fmt::Debug>(outcome: sqlx::Result<T>) -> String {
    let error = outcome.unwrap_err().into_database_error().unwrap();
    error.code().unwrap().into_owned()
}

/// The guards that are missing or do not always fire.
const HOLES: &str = "tower_fence.protected_tables WHERE enabled IS DISTINCT FROM 'A'";

/// The text form of a value of these types depends on settings of the session, or on code of other
/// roles.
#[tokio::test]
async fn columns_of_other_types_are_refused() {
    for column in [
        "code", "price", "size", "day", "at", "lasts", "raw", "tags", "doc", "pair", "birthday",
        "name",
    ] {
        for pattern in [format!("{{{column}}}"), format!("{{sku}}/{{{column}}}")] {
            let refused = protected(&pattern).await.map(drop).unwrap_err();
            let text = refused.to_string();
            assert_contains!(text, &format!("cannot use the column {column}"));
            assert_eq!(code(Err::<(), _>(refused)), "42P10", "{pattern}");
        }
    }
}

/// TRUNCATE also removes rows that a transaction of a stricter isolation level does not see.
#[tokio::test]
async fn a_stricter_transaction_truncates_nothing() {
    let db = protected("{sku}").await.unwrap();
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let mut conn = PgConnection::connect(&db.url).await.unwrap();
        let begin = format!("BEGIN ISOLATION LEVEL {level}");
        Postgres::run(&mut conn, &begin).await;
        admit(&mut conn, "a", 5).await.ok();
        let refused = Postgres::execute(&mut conn, "TRUNCATE item").await;
        assert_eq!(code(refused), "25000", "{level}");
    }
    // Postgres treats READ UNCOMMITTED as READ COMMITTED.
    for level in ["READ COMMITTED", "READ UNCOMMITTED"] {
        let mut conn = PgConnection::connect(&db.url).await.unwrap();
        let truncate = format!("BEGIN ISOLATION LEVEL {level}; TRUNCATE item");
        Postgres::run(&mut conn, &truncate).await;
    }
}

#[tokio::test]
async fn changed_owner_needs_the_table_to_be_protected_again() {
    let db = protected("{sku}").await.unwrap();
    let owner = db.role("ALTER TABLE item OWNER TO {role}").await.name;
    assert_eq!(db.count(HOLES).await, 5);
    db.execute(&format!(
        "GRANT USAGE, CREATE ON SCHEMA public TO {owner}; GRANT USAGE ON SCHEMA tower_fence TO {owner}; \
         GRANT SELECT ON tower_fence.resources TO {owner}; \
         GRANT EXECUTE ON FUNCTION tower_fence.refuse_unfenced TO {owner}; \
         SELECT tower_fence.protect('item', '{{sku}}')"
    ))
    .await;
    assert_eq!(db.count(HOLES).await, 0);
    let owned = format!(
        "pg_trigger AS t JOIN pg_proc AS p ON p.oid = t.tgfoid \
         WHERE t.tgrelid = 'item'::regclass AND pg_get_userbyid(p.proowner) = '{owner}'"
    );
    assert_eq!(db.count(&owned).await, 5);
    let insert = sqlx::query("INSERT INTO item (sku) VALUES ('a')");
    assert_eq!(code(insert.execute(&db.pool).await), "TF428");
}

/// The guard still belongs to the previous owner.
#[tokio::test]
async fn changed_owner_may_remove_the_protection() {
    let db = protected("{sku}").await.unwrap();
    let owner = db
        .role(
            "ALTER TABLE item OWNER TO {role}; GRANT USAGE ON SCHEMA tower_fence TO {role}; \
             GRANT SELECT ON tower_fence.protected_tables TO {role}; \
             GRANT EXECUTE ON FUNCTION tower_fence.unprotect, tower_fence.pattern_parts TO {role}",
        )
        .await;
    let mut conn = owner.connect().await;
    for was_protected in [1, 0] {
        let unprotect = "SELECT tower_fence.unprotect('item')::int::bigint";
        let removed = Postgres::number(&mut conn, unprotect).await;
        assert_eq!(removed.unwrap(), was_protected);
    }
    Postgres::run(&mut conn, "INSERT INTO item (sku) VALUES ('a')").await;
    let guards = "pg_proc WHERE proname = 'fence_guard_item'";
    assert_eq!(db.count(guards).await, 1);
}

/// Unlike `ALTER TABLE`, this statement also changes the owner of the guard.
#[tokio::test]
async fn reassigned_guard_names_an_owner_without_privileges() {
    let db = with_tables().await;
    let former = db
        .role(
            "ALTER TABLE whole OWNER TO {role}; ALTER TABLE parts OWNER TO {role}; \
             GRANT USAGE ON SCHEMA tower_fence TO {role}; GRANT SELECT ON tower_fence.resources TO {role}; \
             GRANT EXECUTE ON FUNCTION tower_fence.refuse_unfenced TO {role}; \
             SELECT tower_fence.protect('whole', '{sku}'), tower_fence.protect('parts', '{sku}')",
        )
        .await
        .name;
    let owner = db
        .role(&format!("REASSIGN OWNED BY {former} TO {{role}}"))
        .await
        .name;
    let mut conn = db.pool.acquire().await.unwrap();
    let writes = [("whole", "whole"), ("parts", "part_1")].map(|(table, written)| {
        let write = format!("UPDATE {table} SET n = 0 WHERE id = 1");
        (write, written)
    });
    for (write, written) in &writes {
        let refused = refuses(&mut conn, write, "42501").await;
        let expected =
            format!("the guard of public.{written} runs with the privileges of {owner}: ");
        assert!(refused.message.starts_with(&expected), "{refused:?}");
    }
    // The error of `protect` has a hint with the statement that repairs the guard.
    let protect = "SELECT tower_fence.protect('whole', '{sku}')";
    let refused = is_refused(execute(&mut conn, protect).await, "42501");
    db.execute(&refused.hint).await;
    for (write, written) in &writes {
        is_unfenced(&mut conn, write, written, "a").await;
    }
    let revoke = format!("REVOKE EXECUTE ON FUNCTION tower_fence.refuse_unfenced FROM {owner}");
    db.execute(&revoke).await;
    for (write, written) in &writes {
        let bypassed = format!("SELECT tower_fence.bypass('a repair'); {write}");
        let refused = refuses(&mut conn, &bypassed, "42501").await;
        let expected =
            format!("the guard of public.{written} runs with the privileges of {owner}: ");
        assert!(refused.message.starts_with(&expected), "{refused:?}");
    }
}

/// `ALTER TABLE ... OWNER` does not change the owner of the partitions.
#[tokio::test]
async fn partitions_of_another_owner_are_protected() {
    let db = with_tables().await;
    let owner = db
        .role(
            "ALTER TABLE parts OWNER TO {role}; GRANT USAGE ON SCHEMA tower_fence TO {role}; \
             GRANT SELECT ON tower_fence.resources TO {role}; \
             GRANT EXECUTE ON FUNCTION tower_fence.refuse_unfenced TO {role}; \
             SELECT tower_fence.protect('parts', '{sku}')",
        )
        .await
        .name;
    assert_eq!(db.count(HOLES).await, 0);
    let mut conn = db.pool.acquire().await.unwrap();
    let write = "UPDATE part_1 SET n = 0 WHERE id = 1";
    is_unfenced(&mut conn, write, "part_1", "a").await;
    // To check a TRUNCATE, the guard would read the partition, which can run code of its owner.
    db.execute(&format!("GRANT SELECT ON part_1 TO {owner}"))
        .await;
    for table in ["part_1", "parts"] {
        let truncate = format!("TRUNCATE {table}");
        let refused = refuses(&mut conn, &truncate, "42501").await;
        let guard = format!("the guard of public.{table} runs with the privileges of {owner}");
        assert_contains!(refused.message, &format!("{guard}, which does not"));
    }
    let change = format!("ALTER TABLE part_1 OWNER TO {owner}");
    db.execute(&change).await;
    is_unfenced(&mut conn, "TRUNCATE part_1", "part_1", "a").await;
}

/// Objects of a role, each of which fails if it runs with the privileges of another role.
const TRAPS: &str = "
    CREATE TYPE pg_temp.trap AS (a int);
    CREATE FUNCTION pg_temp.spring() RETURNS text LANGUAGE plpgsql AS $$ BEGIN
        IF current_user <> session_user THEN RAISE 'runs as %', current_user; END IF; RETURN 'a'; END $$;
    CREATE FUNCTION pg_temp.spring(pg_temp.trap) RETURNS text LANGUAGE sql AS 'SELECT pg_temp.spring()';
    CREATE FUNCTION pg_temp.is_sprung(pg_temp.trap) RETURNS boolean LANGUAGE sql AS
        'SELECT pg_temp.spring() IS NULL';
    CREATE FUNCTION pg_temp.in_index(int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT length(pg_temp.spring())';
    CREATE CAST (pg_temp.trap AS text) WITH FUNCTION pg_temp.spring(pg_temp.trap) AS IMPLICIT;
    CREATE CAST (pg_temp.trap AS boolean) WITH FUNCTION pg_temp.is_sprung(pg_temp.trap) AS IMPLICIT;
    CREATE TABLE pg_temp.mine (sku pg_temp.trap, is_new pg_temp.trap, colour pg_temp.trap, nick pg_temp.trap, n int);
    CREATE INDEX ON pg_temp.mine ((pg_temp.in_index(1)));
    CREATE VIEW pg_temp.fence_new AS SELECT pg_temp.spring() AS sku, true AS is_new, NULL::colour AS colour,
        pg_temp.spring() AS nick;
";

/// Many databases grant EXECUTE on all functions of a schema.
#[tokio::test]
async fn guards_run_no_code_of_a_role_that_may_execute_them() {
    let db = protected("{sku}/{is_new}/{colour}/{nick}").await.unwrap();
    let role = db
        .role(
            "CREATE TABLE parts (LIKE item) PARTITION BY LIST (sku); \
             CREATE TABLE part_1 PARTITION OF parts DEFAULT; CREATE TABLE plain (n int); \
             SELECT tower_fence.protect('parts', '{sku}/{is_new}/{colour}/{nick}'); \
             GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO {role}; \
             GRANT TRIGGER, INSERT ON plain TO {role}",
        )
        .await;
    let mut conn = role.connect().await;
    Postgres::run(&mut conn, TRAPS).await;
    let insert = "INSERT INTO pg_temp.mine VALUES ('(1)', '(2)', '(3)', '(4)')";
    for (trigger, guard, write, code) in [
        (
            "AFTER INSERT ON pg_temp.mine REFERENCING NEW TABLE AS fence_new",
            "item",
            insert,
            "22P02",
        ),
        (
            "AFTER INSERT ON pg_temp.mine FOR EACH ROW",
            "parts",
            insert,
            "22P02",
        ),
        (
            "AFTER INSERT ON pg_temp.mine FOR EACH ROW",
            "item",
            insert,
            "55000",
        ),
        (
            "AFTER INSERT ON plain",
            "item",
            "INSERT INTO plain VALUES (1)",
            "55000",
        ),
        (
            "BEFORE TRUNCATE ON pg_temp.mine",
            "item",
            "TRUNCATE pg_temp.mine",
            "42501",
        ),
    ] {
        let attack = format!(
            "CREATE TRIGGER attack {trigger} EXECUTE FUNCTION fence_guard_{guard}(); {write}"
        );
        let refused = refuses(&mut conn, &attack, code).await;
        assert!(!refused.message.contains("runs as"), "{refused:?}");
    }
}

#[tokio::test]
async fn migrate_and_protect_revoke_privileges_on_a_guard() {
    let db = protected("{sku}").await.unwrap();
    let grant = "GRANT EXECUTE ON FUNCTION public.fence_guard_item TO {role} WITH GRANT OPTION";
    let protect = "SELECT tower_fence.protect('item', '{sku}')";
    let granted = "pg_proc AS p, aclexplode(p.proacl) AS a \
                   WHERE p.proname = 'fence_guard_item' AND a.grantee <> p.proowner";
    for by_migrate in [true, false] {
        let [first, second] = [db.role(grant).await.name, db.role("").await.name];
        let grant = grant.replace("{role}", &second);
        db.execute(&format!("SET ROLE {first}; {grant}; RESET ROLE"))
            .await;
        assert_eq!(db.count(granted).await, 2);
        match by_migrate {
            true => db.fence().migrate().await.unwrap(),
            false => db.execute(protect).await,
        }
        assert_eq!(db.count(granted).await, 0);
    }
}

/// A role that can write to the tables can make stale tokens valid again.
#[tokio::test]
async fn role_that_may_write_to_the_tables_is_reported() {
    let db = Postgres::fresh(2).await;
    let (role, fence) = (db.role("").await.name, db.fence());
    let warnings = async || {
        let (log, _guard) = Log::of_this_thread("warn");
        fence.check().await.unwrap();
        log.text()
    };
    for (privilege, table) in [
        ("INSERT", "held_leases"),
        ("UPDATE", "floors"),
        ("DELETE", "resources"),
        ("TRUNCATE", "resources"),
        ("TRIGGER", "bypasses"),
    ] {
        let right = format!("{privilege} ON tower_fence.{table}");
        db.execute(&format!("GRANT {right} TO {role}")).await;
        assert_contains!(warnings().await, &format!("roles=\"{role} on {table}\""));
        db.execute(&format!("REVOKE {right} FROM {role}")).await;
        assert_eq!(warnings().await, "");
    }
    // A superuser may write without any privilege.
    db.execute(&format!(
        "GRANT ALL ON ALL TABLES IN SCHEMA tower_fence TO {role}; ALTER ROLE {role} SUPERUSER"
    ))
    .await;
    assert_eq!(warnings().await, "");
}

#[tokio::test]
async fn a_long_resource_is_cut_in_the_message() {
    let db = protected("{sku}").await.unwrap();
    let mut conn = db.pool.acquire().await.unwrap();
    let insert = "INSERT INTO item (sku) VALUES (repeat('x', 1000000))";
    let refused = refuses(&mut conn, insert, "TF428").await;
    assert!(refused.message.len() < 1_000, "{}", refused.message.len());
    assert_eq!(refused.problem["resource"], "x".repeat(255));
}

/// Two bypasses do not wait for each other, even if both remove old records.
#[tokio::test]
async fn a_bypass_does_not_wait_for_another_one() {
    let db = protected("{sku}").await.unwrap();
    let old = "INSERT INTO tower_fence.bypasses VALUES ('3', 'someone', 'long ago', '2001-01-01')";
    db.execute(old).await;
    let bypass = "SET LOCAL lock_timeout = '2s'; SELECT tower_fence.bypass('tidy up')";
    let mut transactions = vec![];
    for _ in 0..2 {
        let mut tx = db.pool.begin().await.unwrap();
        Postgres::run(&mut tx, bypass).await;
        transactions.push(tx);
    }
    for tx in transactions {
        tx.commit().await.unwrap();
    }
    assert_eq!(db.count("tower_fence.bypasses").await, 2);
}

#[tokio::test]
async fn default_privileges_grant_nothing_of_the_fence() {
    let db = Postgres::fresh(2).await;
    let defaults = "DROP SCHEMA tower_fence CASCADE; \
         ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO {role}; \
         ALTER DEFAULT PRIVILEGES GRANT EXECUTE ON FUNCTIONS TO {role}; \
         ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO {role}; \
         ALTER DEFAULT PRIVILEGES GRANT USAGE ON TYPES TO {role}; \
         ALTER DEFAULT PRIVILEGES GRANT ALL ON SCHEMAS TO {role}";
    let role = db.role(defaults).await.name;
    db.fence().migrate().await.unwrap();
    let granted = format!(
        "SELECT (SELECT count(*) FROM pg_proc WHERE pronamespace = 'tower_fence'::regnamespace \
             AND has_function_privilege('{role}', oid, 'EXECUTE')) \
         + (SELECT count(*) FROM pg_class AS t WHERE t.relnamespace = 'tower_fence'::regnamespace \
             AND t.relkind IN ('r', 'v') \
             AND has_table_privilege('{role}', t.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE')) \
         + (SELECT count(*) FROM pg_sequence AS q JOIN pg_class AS s ON s.oid = q.seqrelid \
             WHERE s.relnamespace = 'tower_fence'::regnamespace \
             AND has_sequence_privilege('{role}', q.seqrelid, 'USAGE, SELECT, UPDATE')) \
         + (SELECT count(*) FROM pg_type WHERE typnamespace = 'tower_fence'::regnamespace \
             AND typtype = 'd' AND has_type_privilege('{role}', oid, 'USAGE')) \
         + has_schema_privilege('{role}', 'tower_fence', 'CREATE')::int"
    );
    assert_eq!(db.number(&granted).await, 0);
    // A later migration keeps rights that were granted by name.
    db.execute(&format!(
        "GRANT EXECUTE ON FUNCTION tower_fence.admit TO {role}"
    ))
    .await;
    db.fence().migrate().await.unwrap();
    assert_eq!(db.number(&granted).await, 1);
}

/// Settings that change how values and literals are written or read.
const SETTINGS: &[(&str, &str)] = &[
    ("TimeZone", "Asia/Tokyo"),
    ("DateStyle", "SQL, DMY"),
    ("IntervalStyle", "sql_standard"),
    ("extra_float_digits", "-10"),
    ("bytea_output", "escape"),
    ("quote_all_identifiers", "on"),
    ("array_nulls", "off"),
    ("transform_null_equals", "on"),
    ("standard_conforming_strings", "off"),
    ("escape_string_warning", "off"),
    ("xmlbinary", "hex"),
    ("timezone_abbreviations", "India"),
];

#[tokio::test]
async fn settings_of_a_session_change_no_resource() {
    const PATTERN: &str = r#"it's \ 100% "/{sku},{place},{tiny},{count},{number},{id},{is_new},{colour},{nick},{paint}"#;
    const ID: &str = "00000000-0000-0000-0000-00000000000a";
    let db = protected("{sku}").await.unwrap();
    db.execute("CREATE SEQUENCE tokens").await;
    let row = format!("(E'\\\\a', 'b', 1, -2, 3, '{ID}', true, 'red', 'me', 'red')");
    let write = format!(
        "INSERT INTO item (sku, place, tiny, count, number, id, is_new, colour, nick, paint) VALUES {row}; \
         DELETE FROM item"
    );
    let resource = format!(r#"it's \ 100% "/\a,b,1,-2,3,{ID},true,red,me,red"#);
    let all = SETTINGS
        .iter()
        .map(|(name, value)| format!("SET {name} = '{value}'"));
    // A session that protects, and a session that writes, each with and without the settings.
    for (protector, writer) in [(false, false), (false, true), (true, false), (true, true)] {
        let session = async |changed: bool| {
            let mut conn = PgConnection::connect(&db.url).await.unwrap();
            for set in all.clone().filter(|_| changed) {
                Postgres::run(&mut conn, &set).await;
            }
            conn
        };
        let protect = sqlx::query("SELECT tower_fence.protect('item', $1)").bind(PATTERN);
        let protect = protect.execute(&mut session(protector).await).await;
        protect.unwrap();
        let mut conn = session(writer).await;
        let refused = refuses(&mut conn, &write, "TF428").await;
        assert_eq!(refused.problem, json!({ "resource": resource }));
        let mut tx = conn.begin().await.unwrap();
        let admit = sqlx::query("SELECT tower_fence.admit($1, nextval('tokens'))").bind(&resource);
        admit.execute(&mut *tx).await.unwrap();
        Postgres::run(&mut tx, &write).await;
        tx.commit().await.unwrap();
    }
}

/// The owner of a type may replace its casts, or rename it and create a cast to another type under
/// its name.
#[tokio::test]
async fn owner_of_an_enumeration_misleads_no_guard() {
    const CAST: &str = "CREATE FUNCTION always_red(colour) RETURNS text LANGUAGE sql AS $$ SELECT 'red' $$; \
         CREATE CAST (colour AS text) WITH FUNCTION always_red(colour) AS IMPLICIT";
    const RENAME: &str = "ALTER TYPE colour RENAME TO hue; CREATE TYPE colour AS ENUM ('red', 'blue'); \
         CREATE FUNCTION always_red(hue) RETURNS colour LANGUAGE sql AS $$ SELECT 'red'::colour $$; \
         CREATE CAST (hue AS colour) WITH FUNCTION always_red(hue)";
    for pattern in ["{colour}", "{paint}"] {
        let protect = format!("SELECT tower_fence.protect('item', '{pattern}')");
        for changes in [[CAST, &protect], [&protect, RENAME]] {
            let db = Postgres::fresh(2).await;
            let mut conn = db.pool.acquire().await.unwrap();
            let set_up = "CREATE SEQUENCE tokens; CREATE TYPE colour AS ENUM ('red', 'blue'); \
                 CREATE DOMAIN paint AS colour; CREATE TABLE item (colour colour, paint paint)";
            Postgres::run(&mut conn, set_up).await;
            for change in changes {
                Postgres::run(&mut conn, change).await;
            }
            let written = "INSERT INTO item VALUES ('red', 'red'); DELETE FROM item";
            run_admitted(&mut conn, ["red"], written).await;
            let other = format!(
                "{}INSERT INTO item VALUES ('blue', 'blue')",
                admissions(["red"])
            );
            is_unfenced(&mut conn, &other, "item", "blue").await;
        }
    }
}

/// Postgres before 18 has no virtual columns, so the test marks this column as virtual in the
/// catalog.
#[tokio::test]
async fn virtual_generated_column_cannot_be_a_resource() {
    let db = Postgres::fresh(2).await;
    db.execute(
        "CREATE TABLE item (sku text, name text GENERATED ALWAYS AS (upper(sku)) STORED); \
         SELECT tower_fence.protect('item', '{name}')",
    )
    .await;
    db.execute("UPDATE pg_attribute SET attgenerated = 'v' WHERE attrelid = 'item'::regclass AND attname = 'name'")
        .await;
    let protect = async |resource: &str| {
        let protect = sqlx::query("SELECT tower_fence.protect('item', $1)").bind(resource);
        protect.execute(&db.pool).await
    };
    for resource in ["{name}", "{sku}/{name}"] {
        let refused = protect(resource).await.unwrap_err();
        assert_contains!(refused.to_string(), "virtual generated column");
        assert_eq!(code(Err::<(), _>(refused)), "42P10", "{resource}");
    }
    protect("{sku}").await.unwrap();
}

/// By default, every role may create temporary tables, and PUBLIC may execute new functions.
#[tokio::test]
async fn fake_guard_of_an_unprivileged_role_is_ignored() {
    let db = protected("{sku}").await.unwrap();
    let role = db.role("").await.name;
    let mut conn = PgConnection::connect(&db.url).await.unwrap();
    let fake = format!(
        "SET ROLE {role}; CREATE TEMP TABLE own (n int); \
         CREATE FUNCTION pg_temp.fence_guard_x() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER \
             AS 'BEGIN RETURN NULL; END'; \
         CREATE TRIGGER fence_guard_x AFTER INSERT ON own EXECUTE FUNCTION pg_temp.fence_guard_x('{{sku}}')"
    );
    Postgres::run(&mut conn, &fake).await;
    db.fence().check().await.unwrap();
    db.fence().migrate().await.unwrap();
}

/// A role that may create objects gives them the names of objects of the fence, or of objects that
/// the statements of the fence use.
#[tokio::test]
async fn objects_of_other_owners_replace_no_fence_or_server_objects() {
    let db = protected("{sku}").await.unwrap();
    let calls = |arguments: &str| {
        format!(
            "CREATE FUNCTION concat({arguments}) RETURNS text LANGUAGE plpgsql AS \
             'BEGIN INSERT INTO public.called VALUES (current_user); RETURN pg_catalog.concat($1, $2); END';"
        )
    };
    db.execute(&format!(
        "CREATE TABLE called (role text); CREATE TABLE other (n int); {} {} \
         CREATE FUNCTION is_like(name, name) RETURNS boolean LANGUAGE plpgsql AS \
             'BEGIN INSERT INTO public.called VALUES (current_user); RETURN true; END'; \
         CREATE OPERATOR ~~ (LEFTARG = name, RIGHTARG = name, FUNCTION = is_like); \
         CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; \
         CREATE TRIGGER fence_guard_x AFTER INSERT ON other EXECUTE FUNCTION audit('{{')",
        calls("text, regprocedure"),
        calls("text, regclass"),
    ))
    .await;
    let fence = db.fence();
    fence.migrate().await.unwrap();
    db.execute("DROP SCHEMA tower_fence CASCADE").await;
    fence.migrate().await.unwrap();
    db.execute("DROP SCHEMA tower_fence CASCADE").await;
    db.execute(&fence.schema_sql()).await;
    fence.check().await.unwrap();
    let open =
        "pg_proc WHERE oid = 'audit'::regproc AND has_function_privilege('public', oid, 'EXECUTE')";
    for (rows, count) in [
        ("tower_fence.protected_tables WHERE enabled = 'A'", 5),
        ("tower_fence.unprotect('other') AS was WHERE was", 0),
        (open, 1),
        ("called", 0),
    ] {
        assert_eq!(db.count(rows).await, count, "{rows}");
    }
}
