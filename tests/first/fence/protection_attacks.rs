//! Ways around protected tables that are closed, and what a migration takes back from roles that have rights by
//! default.

use sqlx::{Connection, PgConnection, Postgres};

use crate::support::{
    database::{Fresh, TestDatabase},
    functions::{admit, in_transaction, is_refused},
};

use super::protection::is_unfenced;

async fn protected(column: &str) -> sqlx::Result<Fresh<Postgres>> {
    let db = Postgres::fresh(2).await;
    db.execute(
        "CREATE TYPE colour AS ENUM ('red'); \
         CREATE TABLE item (sku text, day date, at timestamptz, size float8, sizes float4[], raw bytea, \
             colour colour, number bigint, id uuid, code char(4), price numeric)",
    )
    .await;
    let protect = sqlx::query("SELECT fence_protect('item', $1)").bind(column);
    protect.execute(&db.pool).await?;
    Ok(db)
}

#[track_caller]
fn code<T: std::fmt::Debug>(outcome: sqlx::Result<T>) -> String {
    let error = outcome.unwrap_err();
    let error = error.into_database_error().expect("an error of the server");
    error.code().expect("a code").into_owned()
}

#[tokio::test]
async fn a_resource_whose_text_depends_on_the_session_is_refused() {
    for (resource, refused) in [
        ("day", "42P17"),
        ("at", "42P17"),
        ("sku || random()", "42P17"),
        ("size", "42P10"),
        ("'size ' || size", "42P10"),
        ("sizes[1]", "42P10"),
        ("raw", "42P10"),
        (r"sku || '\\' || number", "42P10"),
    ] {
        assert_eq!(
            code(protected(resource).await.map(|_| ())),
            refused,
            "{resource}"
        );
    }
    for resource in [
        "sku",
        "colour",
        "number",
        "id",
        "code",
        "price",
        "sku || '/' || number",
        "sku || chr(92) || number",
    ] {
        protected(resource).await.unwrap();
    }
}

/// TRUNCATE takes rows away that a stricter transaction does not see.
#[tokio::test]
async fn a_stricter_transaction_truncates_nothing() {
    let db = protected("sku").await.unwrap();
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let mut conn = PgConnection::connect(&db.url).await.unwrap();
        let begin = format!("BEGIN ISOLATION LEVEL {level}");
        Postgres::execute(&mut conn, &begin).await.unwrap();
        admit(&mut conn, "a", rand::random_range(1..1_000_000_000))
            .await
            .ok();
        let refused = Postgres::execute(&mut conn, "TRUNCATE item").await;
        assert_eq!(code(refused), "25000", "{level}");
    }
    let mut tx = db.pool.begin().await.unwrap();
    Postgres::execute(&mut tx, "TRUNCATE item").await.unwrap();
}

#[tokio::test]
async fn a_table_with_another_owner_is_not_enabled_until_it_is_protected_again() {
    let db = protected("sku").await.unwrap();
    let owner = format!("owner_{:016x}", rand::random::<u64>());
    db.execute(&format!(
        "CREATE ROLE {owner}; ALTER TABLE item OWNER TO {owner}"
    ))
    .await;
    let not_enabled = "SELECT count(*) FROM fence_protected WHERE enabled IS DISTINCT FROM 'A'";
    assert_eq!(db.number(not_enabled).await, 5);
    db.execute(&format!(
        "GRANT USAGE, CREATE ON SCHEMA public TO {owner}; GRANT SELECT ON fence_resources TO {owner}; \
         GRANT EXECUTE ON FUNCTION fence_refuse_unfenced TO {owner}; SELECT fence_protect('item', 'sku')"
    ))
    .await;
    assert_eq!(db.number(not_enabled).await, 0);
    let owned = format!(
        "SELECT count(*) FROM pg_trigger AS t JOIN pg_proc AS p ON p.oid = t.tgfoid \
         WHERE t.tgrelid = 'item'::regclass AND pg_get_userbyid(p.proowner) = '{owner}'"
    );
    assert_eq!(db.number(&owned).await, 5);
    let refused = sqlx::query("INSERT INTO item (sku) VALUES ('a')")
        .execute(&db.pool)
        .await;
    assert_eq!(code(refused), "TF428");
    db.execute(&format!("DROP OWNED BY {owner}; DROP ROLE {owner}"))
        .await;
}

#[tokio::test]
async fn a_long_resource_is_cut_in_the_message() {
    let db = protected("sku").await.unwrap();
    let insert = sqlx::query("INSERT INTO item (sku) VALUES (repeat('x', 1000000))");
    let refused = insert.execute(&db.pool).await.unwrap_err().to_string();
    assert!(refused.len() < 1_000, "{}", refused.len());
}

/// Two of these do not wait for each other where old ones are to be forgotten.
#[tokio::test]
async fn a_bypass_does_not_wait_for_another_one() {
    let db = protected("sku").await.unwrap();
    db.execute("INSERT INTO fence_bypasses VALUES ('3', 'someone', 'long ago', '2001-01-01')")
        .await;
    let mut transactions = vec![];
    for _ in 0..2 {
        let mut tx = db.pool.begin().await.unwrap();
        Postgres::execute(
            &mut tx,
            "SET LOCAL lock_timeout = '2s'; SELECT fence_bypass('tidy up')",
        )
        .await
        .unwrap();
        transactions.push(tx);
    }
    for tx in transactions {
        tx.commit().await.unwrap();
    }
    assert_eq!(db.number("SELECT count(*) FROM fence_bypasses").await, 2);
}

#[tokio::test]
async fn default_privileges_give_nobody_what_is_for_operators() {
    let db = Postgres::fresh(2).await;
    let role = format!("app_{:016x}", rand::random::<u64>());
    db.execute(&format!(
        "DROP SCHEMA public CASCADE; CREATE SCHEMA public; CREATE ROLE {role}; \
         ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT ALL ON TABLES TO {role}; \
         ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT EXECUTE ON FUNCTIONS TO {role}"
    ))
    .await;
    db.fence().migrate().await.unwrap();
    let functions = format!(
        "SELECT count(*) FROM pg_proc WHERE proname LIKE 'fence\\_%' \
             AND has_function_privilege('{role}', oid, 'EXECUTE') \
             AND proname NOT IN ('fence_admit', 'fence_raise', 'fence_max_token', 'fence_history')"
    );
    assert_eq!(db.number(&functions).await, 0);
    let tables = format!(
        "SELECT count(*) FROM pg_class AS t WHERE t.relname IN \
             ('fence_bypasses', 'fence_leases', 'fence_waiters', 'fence_lines', 'fence_listeners') \
         AND has_table_privilege('{role}', t.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE')"
    );
    assert_eq!(db.number(&tables).await, 0);
    db.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await;
}

/// A setting, a value that is not the one of the guard, and an expression whose text depends on it.
const SETTINGS: &[(&str, &str, &str)] = &[
    (
        "TimeZone",
        "Asia/Tokyo",
        "CASE WHEN at >= '2024-02-01 00:00' THEN 'late' ELSE 'early' END",
    ),
    ("TimeZone", "Asia/Tokyo", "xmlelement(name at, at)"),
    (
        "DateStyle",
        "SQL, DMY",
        "CASE WHEN day = '01/02/2024' THEN 'that' ELSE 'other' END",
    ),
    (
        "IntervalStyle",
        "sql_standard",
        "CASE WHEN lasts = '-1 02:00:00' THEN 'that' ELSE 'other' END",
    ),
    ("extra_float_digits", "-10", "price::float8"),
    ("bytea_output", "escape", "decode('41ff', 'hex')"),
    (
        "quote_all_identifiers",
        "on",
        "quote_ident('a' || lower(sku))",
    ),
    (
        "array_nulls",
        "off",
        "CASE WHEN sku = ANY ('{NULL}') THEN 'there' ELSE 'not there' END",
    ),
    (
        "transform_null_equals",
        "on",
        "CASE WHEN code = NULL THEN 'none' ELSE 'some' END",
    ),
    (
        "xmlbinary",
        "hex",
        "xmlelement(name raw, decode('41ff', 'hex'))",
    ),
    (
        "lc_monetary",
        "de_DE.utf8",
        "CASE WHEN price::money = '1.234'::money THEN 'that' ELSE 'other' END",
    ),
];

#[tokio::test]
async fn settings_of_a_session_change_no_resource() {
    // Evaluated as a query of its own, with all settings as the guard has them or with one that differs.
    let text = async |db: &Fresh<Postgres>, setting: &str, expression: &str| {
        let mut conn = PgConnection::connect(&db.url).await.unwrap();
        let pinned =
            "SET TimeZone = 'UTC'; SET DateStyle = 'ISO, MDY'; SET IntervalStyle = 'postgres'";
        Postgres::execute(&mut conn, &format!("{pinned}; {setting}"))
            .await
            .unwrap();
        let text = format!("SELECT (({expression})::text) FROM item");
        let text: String = sqlx::query_scalar(sqlx::AssertSqlSafe(text))
            .fetch_one(&mut conn)
            .await
            .unwrap();
        (conn, text)
    };
    let mut depend = 0;
    for (setting, value, expression) in SETTINGS {
        let db = Postgres::fresh(2).await;
        let set = format!("SET {setting} = '{value}'");
        db.execute(
            "CREATE SEQUENCE tokens; CREATE TABLE item (sku text, day date, at timestamptz, lasts interval, code text, price numeric); \
             INSERT INTO item VALUES ('NULL', '2024-02-01', '2024-02-01 00:00+09', '-1 day +2:00', NULL, 1.2345678901234567)",
        )
        .await;
        if Postgres::execute(&mut *db.pool.acquire().await.unwrap(), &set)
            .await
            .is_err()
        {
            println!("this server has no {value}");
            continue;
        }
        let (mut plain, expected) = text(&db, "SELECT 1", expression).await;
        let (mut other, differs) = text(&db, &set, expression).await;
        depend += usize::from(expected != differs);
        // Whichever session protects the table, and whichever writes.
        for protector in [&mut plain, &mut other] {
            sqlx::query("SELECT fence_protect('item', $1)")
                .bind(expression)
                .execute(&mut *protector)
                .await
                .unwrap_or_else(|error| panic!("{expression}: {error}"));
            for writer in ["SELECT 1", &set] {
                let mut conn = PgConnection::connect(&db.url).await.unwrap();
                Postgres::execute(&mut conn, writer).await.unwrap();
                let write = "UPDATE item SET sku = sku";
                if expected != differs {
                    let outcome = in_transaction(
                        &mut conn,
                        &format!("SELECT fence_admit($a${differs}$a$, nextval('tokens')); {write}"),
                    )
                    .await;
                    is_unfenced(outcome, "item", &expected);
                }
                let admitted =
                    format!("SELECT fence_admit($a${expected}$a$, nextval('tokens')); {write}");
                in_transaction(&mut conn, &admitted)
                    .await
                    .unwrap_or_else(|refused| panic!("{setting}, {writer}: {refused:?}"));
            }
        }
    }
    assert!(
        depend >= 9,
        "only {depend} expressions depend on their setting"
    );
}

/// No version before 18 has virtual columns: the catalog is told that this one is.
#[tokio::test]
async fn virtual_generated_column_is_no_resource() {
    let db = Postgres::fresh(2).await;
    db.execute(
        "CREATE TABLE item (sku text, name text GENERATED ALWAYS AS (upper(sku)) STORED); \
         SELECT fence_protect('item', 'name')",
    )
    .await;
    db.execute("UPDATE pg_attribute SET attgenerated = 'v' WHERE attrelid = 'item'::regclass AND attname = 'name'")
        .await;
    let protect = async |resource: &str| {
        let protect = sqlx::query("SELECT fence_protect('item', $1)").bind(resource);
        protect.execute(&db.pool).await
    };
    for resource in ["name", "sku || name"] {
        let refused = protect(resource).await.unwrap_err();
        assert!(
            refused.to_string().contains("virtual generated column"),
            "{refused}"
        );
        assert_eq!(code(Err::<(), _>(refused)), "42P10", "{resource}");
    }
    protect("sku").await.unwrap();
}

#[tokio::test]
async fn time_zone_abbreviations_of_a_session_are_refused() {
    let db = protected("sku").await.unwrap();
    let mut conn = PgConnection::connect(&db.url).await.unwrap();
    let write = "SELECT fence_admit('a', 1); INSERT INTO item (sku) VALUES ('a')";
    let other = format!("SET LOCAL timezone_abbreviations = 'India'; {write}");
    let refused = is_refused(in_transaction(&mut conn, &other).await, "22023");
    assert!(
        refused.message.contains("timezone_abbreviations"),
        "{refused:?}"
    );
    in_transaction(&mut conn, write).await.unwrap();
}
