//! Protected tables: which statements they refuse, and which calls count as an admission.

use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Postgres};
use tower_fence::{
    TokenUse,
    announce::{Announce, LeaseDigest},
    fence::WriteError,
};

use crate::support::{
    database::{Fresh, TestDatabase, read},
    fence::{resource, sku, token},
    functions::{admit, execute, in_transaction, refuses},
};

/// Two protected tables, one of them partitioned, and an unprotected one.
pub const TABLES: &str = "
    CREATE TABLE whole (id int, sku text, n int, PRIMARY KEY (id, sku));
    CREATE TABLE parts (LIKE whole INCLUDING ALL) PARTITION BY LIST (sku);
    CREATE TABLE part_1 PARTITION OF parts FOR VALUES IN ('a', 'b');
    CREATE TABLE part_2 PARTITION OF parts FOR VALUES IN ('c') PARTITION BY RANGE (id);
    CREATE TABLE part_2_1 PARTITION OF part_2 DEFAULT;
    CREATE TABLE part_3 PARTITION OF parts DEFAULT;
    CREATE TABLE twin (LIKE whole INCLUDING ALL);
    INSERT INTO whole VALUES (1, 'a', 1), (2, 'a', 2), (3, 'b', 3), (4, 'c', 4);
    INSERT INTO parts TABLE whole;
    INSERT INTO twin TABLE whole;
    CREATE SEQUENCE tokens START 100;
    SELECT tower_fence.protect('whole', '{sku}'), tower_fence.protect('parts', '{sku}');
";

pub async fn with_tables() -> Fresh<Postgres> {
    let db = Postgres::fresh(4).await;
    db.execute(TABLES).await;
    db
}

/// Returns statements that admit these resources in the current transaction.
pub fn admissions<'a>(resources: impl IntoIterator<Item = &'a str>) -> String {
    let all = resources.into_iter();
    all.map(|one| format!("SELECT tower_fence.admit('{one}', nextval('tokens')); "))
        .collect()
}

pub async fn rows(conn: &mut PgConnection, table: &str) -> String {
    let rows = format!("SELECT string_agg(t::text, ' ' ORDER BY t::text) FROM {table} AS t");
    let rows: Option<String> = read(conn, &rows).await;
    rows.unwrap_or_default()
}

/// Runs statements in a transaction that first admits these resources.
pub async fn run_admitted<const N: usize>(
    conn: &mut PgConnection,
    resources: [&str; N],
    sql: &str,
) {
    let ran = in_transaction(conn, &format!("{}{sql}", admissions(resources))).await;
    ran.unwrap_or_else(|refused| panic!("{sql}: {refused:?}"));
}

/// Checks that statements in a transaction are refused without an admission of this resource.
pub async fn is_unfenced(conn: &mut PgConnection, sql: &str, table: &str, resource: &str) {
    let refused = refuses(conn, sql, "TF428").await;
    let expected = format!("public.{table} is written without an admission of {resource}");
    assert_eq!(refused.message, expected, "{sql}");
    assert_eq!(refused.problem, json!({ "resource": resource }));
    for remedy in ["tower_fence.admit()", "tower_fence.bypass()"] {
        assert!(refused.hint.contains(remedy), "{refused:?}");
    }
}

/// Statements on `{t}`, each with the resources of the rows that it writes.
#[rustfmt::skip]
const WRITES: &[(&str, &str)] = &[
    ("INSERT INTO {t} VALUES (9, 'a', 1)", "a"),
    ("INSERT INTO {t} VALUES (9, 'a', 1), (10, 'b', 1)", "a b"),
    ("INSERT INTO {t} SELECT id + 100, sku, n FROM {t}", "a b c"),
    ("UPDATE {t} SET n = n + 1 WHERE sku = 'b'", "b"),
    ("UPDATE {t} SET n = n + 1", "a b c"),
    // The statement writes a row without changing it.
    ("UPDATE {t} SET n = n WHERE sku = 'a'", "a"),
    // Rows move from one resource to another, within one partition and between two partitions.
    ("UPDATE {t} SET sku = 'b' WHERE id = 1", "a b"),
    ("UPDATE {t} SET sku = 'd' WHERE id = 4", "c d"),
    ("UPDATE {t} SET sku = CASE sku WHEN 'a' THEN 'b' ELSE 'a' END WHERE sku < 'c'", "a b"),
    ("DELETE FROM {t} WHERE id = 3", "b"),
    ("DELETE FROM {t}", "a b c"),
    ("TRUNCATE {t}", "a b c"),
    ("INSERT INTO {t} VALUES (1, 'a', 7) ON CONFLICT (id, sku) DO UPDATE SET n = 7", "a"),
    (
        "INSERT INTO {t} VALUES (1, 'a', 7), (9, 'b', 7) ON CONFLICT (id, sku) DO UPDATE SET n = 7",
        "a b",
    ),
    ("INSERT INTO {t} VALUES (1, 'a', 7) ON CONFLICT (id, sku) DO UPDATE SET sku = 'b'", "a b"),
    (
        "MERGE INTO {t} AS t USING (VALUES (1, 'a'), (8, 'c')) AS s (id, sku) ON t.id = s.id \
         WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.sku, 0)",
        "a c",
    ),
    (
        "MERGE INTO {t} AS t USING (VALUES (1)) AS s (id) ON t.id = s.id WHEN MATCHED THEN UPDATE SET sku = 'b'",
        "a b",
    ),
    // The result of a statement with `WITH` reports only its last part.
    ("WITH a AS (UPDATE {t} SET n = 0 WHERE sku = 'a' RETURNING 1) SELECT count(*) FROM a", "a"),
    (
        "WITH gone AS (DELETE FROM {t} WHERE sku = 'c' RETURNING *) INSERT INTO {t} SELECT id, 'b', n FROM gone",
        "b c",
    ),
    ("DO $$ BEGIN DELETE FROM {t} WHERE sku = 'b'; END $$", "b"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_write_needs_the_admission_of_each_resource() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let version = "SELECT current_setting('server_version_num')::bigint";
    let has_merge = db.number(version).await >= 150_000;
    for table in ["whole", "parts"] {
        let before = rows(&mut conn, table).await;
        for (statement, resources) in WRITES {
            if !has_merge && statement.starts_with("MERGE") {
                continue;
            }
            let statement = statement.replace("{t}", table);
            let resources: Vec<_> = resources.split(' ').collect();
            for missing in &resources {
                let others = resources.iter().filter(|other| *other != missing);
                let admitted = admissions(others.copied());
                let refused = format!("{admitted}{statement}");
                let message = refuses(&mut conn, &refused, "TF428").await.message;
                assert!(
                    message.ends_with(&format!(" of {missing}")),
                    "{refused}: {message}"
                );
                refuses(&mut conn, &statement, "TF428").await;
            }
            assert_eq!(rows(&mut conn, table).await, before, "{statement}");

            let admitted = admissions(resources);
            let both = statement.replace(table, "twin");
            execute(&mut conn, &format!("BEGIN; {both}; {admitted}{statement}"))
                .await
                .unwrap_or_else(|refused| panic!("{statement}: {refused:?}"));
            let as_twin = rows(&mut conn, "twin").await;
            assert_eq!(rows(&mut conn, table).await, as_twin, "{statement}");
            Postgres::run(&mut conn, "ROLLBACK").await;
        }
    }
}

#[tokio::test]
async fn copy_needs_an_admission_too() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    for table in ["whole", "parts"] {
        for (admitted, written) in [("", 0), ("a", 0), ("a b", 2)] {
            let mut tx = conn.begin().await.unwrap();
            for resource in admitted.split_whitespace() {
                Postgres::run(&mut tx, &admissions([resource])).await;
            }
            let mut copy = tx
                .copy_in_raw(&format!("COPY {table} FROM STDIN"))
                .await
                .unwrap();
            copy.send(&b"11\ta\t1\n12\tb\t1\n"[..]).await.unwrap();
            match copy.finish().await {
                Ok(copied) => assert_eq!(copied, written),
                Err(error) => {
                    let error = error.into_database_error().unwrap();
                    assert_eq!((error.code().as_deref(), written), (Some("TF428"), 0));
                }
            }
            tx.rollback().await.unwrap();
        }
    }
}

#[tokio::test]
async fn statements_that_write_no_row_need_no_admission() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    for table in ["whole", "parts"] {
        for statement in [
            "SELECT * FROM {t} FOR UPDATE",
            "UPDATE {t} SET n = 0 WHERE n > 99",
            "DELETE FROM {t} WHERE n > 99",
            "INSERT INTO {t} SELECT * FROM {t} WHERE n > 99",
            "INSERT INTO {t} VALUES (1, 'a', 9) ON CONFLICT DO NOTHING",
        ] {
            let statement = statement.replace("{t}", table);
            Postgres::run(&mut conn, &statement).await;
        }
        let empty = format!("DELETE FROM {table}");
        run_admitted(&mut conn, ["a", "b", "c"], &empty).await;
        Postgres::run(&mut conn, &format!("TRUNCATE {table}")).await;
    }
}

const WRITE_A: &str =
    "UPDATE whole SET n = n + 1 WHERE sku = 'a'; UPDATE parts SET n = n + 1 WHERE sku = 'a'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admission_must_precede_in_the_same_transaction() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let admit_a = admissions(["a"]);
    let caught = |statement: &str| {
        format!("DO $$ BEGIN {statement} EXCEPTION WHEN SQLSTATE 'TF412' THEN END $$")
    };
    let again = caught("PERFORM tower_fence.admit('a', 1);");
    for admitted in [
        admit_a.clone(),
        format!("SAVEPOINT s; {admit_a} RELEASE s"),
        format!("SAVEPOINT s; {admit_a} RELEASE s; SAVEPOINT t; SELECT 1; ROLLBACK TO t"),
        format!("{admit_a} SAVEPOINT s; {admit_a} ROLLBACK TO s"),
        format!("{admit_a} SELECT tower_fence.raise('a', nextval('tokens'))"),
        "DO $$ BEGIN PERFORM tower_fence.admit('a', nextval('tokens')); END $$".to_owned(),
        // The second call is refused, but the first one has admitted the token.
        format!("{admit_a} {again}"),
    ] {
        run_admitted(&mut conn, [], &format!("{admitted}; {WRITE_A}")).await;
    }
    for not_admitted in [
        "SELECT 1".to_owned(),
        // An admission of another resource, or calls that only read or raise the fence.
        admissions(["b"]),
        "SELECT tower_fence.max_token('a')".to_owned(),
        "SELECT tower_fence.raise('a', nextval('tokens'))".to_owned(),
        format!("{admit_a} COMMIT; BEGIN"),
        format!("SAVEPOINT s; {admit_a} ROLLBACK TO s"),
        format!("SAVEPOINT s; SAVEPOINT t; {admit_a} RELEASE t; ROLLBACK TO s"),
        "DO $$ BEGIN PERFORM tower_fence.admit('a', nextval('tokens')), 1 / 0; \
         EXCEPTION WHEN division_by_zero THEN END $$"
            .to_owned(),
        // An admission whose token was already used.
        again,
    ] {
        let write = format!("{not_admitted}; {WRITE_A}");
        is_unfenced(&mut conn, &write, "whole", "a").await;
    }
    let late = format!("{WRITE_A}; {admit_a}");
    is_unfenced(&mut conn, &late, "whole", "a").await;
    let written = db.number("SELECT sum(n) FROM whole WHERE sku = 'a'").await;
    assert_eq!(written, 3 + 2 * 7);
}

#[tokio::test]
async fn caught_refusal_keeps_the_rest_of_the_transaction() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let both = format!(
        "INSERT INTO ledger VALUES (1); SAVEPOINT s; DO $$ BEGIN {WRITE_A}; \
         EXCEPTION WHEN SQLSTATE 'TF428' THEN INSERT INTO ledger VALUES (2); END $$"
    );
    run_admitted(&mut conn, [], &both).await;
    assert_eq!(db.entries().await, 2);
    let unchanged = rows(&mut conn, "twin").await;
    assert_eq!(rows(&mut conn, "whole").await, unchanged);
}

#[tokio::test]
async fn a_raise_and_a_grant_admit_nothing() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let fence = db.fence();
    let (name, lease) = (resource("a"), LeaseDigest::of("its lease"));
    // A later transaction would be refused in any case, so the test reads the row, which must not
    // name the transaction of the raise.
    let admitted_by =
        "SELECT coalesce((SELECT admitted_by::text::bigint FROM tower_fence.resources), 0)";
    // The first raise finds no row. The second one finds an admitted row.
    for first in [1_000, 2_000] {
        let before = db.number(admitted_by).await;
        fence.raise(&name, token(first)).await.unwrap();
        assert_eq!(db.number(admitted_by).await, before);
        let announced = fence.announce(&name, token(first + 1), &lease, false);
        announced.await.unwrap();
        assert_eq!(db.number(admitted_by).await, before);
        is_unfenced(&mut conn, WRITE_A, "whole", "a").await;
        admit(&mut conn, "a", first + 1).await.unwrap();
        assert_ne!(db.number(admitted_by).await, before);
    }
    // The first announcement creates the row.
    db.execute("DELETE FROM tower_fence.resources").await;
    let announced = fence.announce(&name, token(3_000), &lease, false);
    announced.await.unwrap();
    assert_eq!(db.number(admitted_by).await, 0);
}

/// The tests of the layer run the other write methods.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_and_own_transactions_admit_their_token() {
    let db = with_tables().await;
    let (fence, name) = (db.reusing_fence(), resource("a"));
    // The first write creates the row of the resource. The second one runs in a transaction that
    // began early, at the end of the first one.
    for used in [1, 2] {
        let tx = fence.begin(&name, token(used), TokenUse::SingleUse).await;
        let mut tx = tx.unwrap();
        Postgres::run(&mut tx, WRITE_A).await;
        tx.commit().await.unwrap();
    }
    let mut own = db.pool.begin().await.unwrap();
    let admitted = fence.admit(&mut own, &name, token(3), TokenUse::Reusable);
    admitted.await.unwrap();
    Postgres::run(&mut own, WRITE_A).await;
    own.commit().await.unwrap();
    let written = "SELECT sum(n) FROM whole WHERE sku = 'a'";
    assert_eq!(db.number(written).await, 3 + 2 * 3);
}

#[tokio::test]
async fn single_statement_contains_its_admission() {
    let db = with_tables().await;
    let (fence, sku) = (db.fence(), sku());
    // The resource is new, has a row, or has a row that another session has just changed.
    for number in 11..=16 {
        for table in ["whole", "parts"] {
            let insert =
                format!("INSERT INTO {table} SELECT {number}, 'sku-1', 0 FROM fence RETURNING id");
            let token_use = match table {
                "whole" => TokenUse::Reusable,
                _ => TokenUse::SingleUse,
            };
            let insert = AssertSqlSafe(insert);
            let written = fence.write::<(i32,)>(&sku, token(number), token_use, insert);
            assert_eq!(written.await.unwrap(), [(i32::try_from(number).unwrap(),)]);
        }
        let other =
            "UPDATE whole SET n = 9 WHERE sku = 'b' AND EXISTS (SELECT FROM fence) RETURNING n";
        let refused = fence
            .write::<(i32,)>(&sku, token(1_000), TokenUse::Reusable, other)
            .await;
        let Err(WriteError::Statement(error)) = &refused else {
            panic!("{refused:?}");
        };
        let code = error.as_database_error().and_then(|error| error.code());
        assert_eq!(code.as_deref(), Some("TF428"));
    }
    assert_eq!(db.count("parts WHERE sku = 'sku-1'").await, 6);
    assert_eq!(db.count("whole WHERE sku = 'b' AND n = 3").await, 1);
}
