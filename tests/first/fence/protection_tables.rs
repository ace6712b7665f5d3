//! Which tables can be protected, with which patterns, and the effects on partitions, foreign keys
//! and names.

use sqlx::{PgConnection, Postgres};

use super::protection::{admissions, is_unfenced, rows, run_admitted, with_tables};
use crate::support::{
    database::{TestDatabase, read},
    functions::{execute, refuses},
};

/// Returns the guards that are missing or do not always fire, each with its relation.
async fn holes(conn: &mut PgConnection) -> Vec<String> {
    let holes = "SELECT concat_ws(' ', relation, guard, enabled) FROM tower_fence.protected_tables \
         WHERE enabled IS DISTINCT FROM 'A' ORDER BY 1";
    sqlx::query_scalar(holes).fetch_all(conn).await.unwrap()
}

const PROTECT: &str =
    "SELECT tower_fence.protect('whole', '{sku}'), tower_fence.protect('parts', '{sku}')";

/// A table has the guard of one fence. The view of another fence must not show it as protected.
#[tokio::test]
async fn a_table_is_protected_by_one_fence() {
    let db = with_tables().await;
    let other = db.fence_with(|fence| fence.schema("other").unwrap());
    other.migrate().await.unwrap();
    let guards = async |schema: &str| {
        let guards = format!("{schema}.protected_tables WHERE relation = 'whole'::regclass");
        db.count(&guards).await
    };
    let mut conn = db.pool.acquire().await.unwrap();
    for table in ["whole", "parts"] {
        let protect = format!("SELECT other.protect('{table}', '{{sku}}')");
        let refused = refuses(&mut conn, &protect, "55000").await;
        let expected = format!("{table} is protected by another fence");
        assert!(refused.message.ends_with(&expected), "{refused:?}");
        assert_eq!(refused.hint, "Call tower_fence.unprotect() first.");
    }
    assert_eq!((guards("other").await, guards("tower_fence").await), (0, 5));
    db.execute("SELECT tower_fence.unprotect('whole'), other.protect('whole', '{sku}')")
        .await;
    assert_eq!((guards("other").await, guards("tower_fence").await), (5, 0));
    // A fence that was dropped cannot remove its protection.
    db.execute("DROP SCHEMA other CASCADE; SELECT tower_fence.protect('whole', '{sku}')")
        .await;
    assert_eq!(guards("tower_fence").await, 5);
}

#[tokio::test]
async fn view_shows_each_guard_and_each_missing_one() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let protected = "SELECT string_agg(concat(relation, '.', guard, enabled), ' ' ORDER BY relation::text, guard) \
         FROM tower_fence.protected_tables WHERE pattern = '{sku}' AND missing_columns = '{}'";
    let protected: String = read(&mut *conn, protected).await;
    assert_eq!(
        protected,
        "part_1.rowsA part_1.truncateA part_2.rowsA part_2.truncateA part_2_1.rowsA part_2_1.truncateA \
         part_3.rowsA part_3.truncateA parts.rowsA parts.truncateA \
         whole.attachA whole.deleteA whole.insertA whole.truncateA whole.updateA"
    );
    #[rustfmt::skip]
    let rows = [
        ("ALTER TABLE whole DISABLE TRIGGER fence_guard_update", "whole update D"),
        // pg_restore disables triggers like this while it restores data.
        (
            "ALTER TABLE whole DISABLE TRIGGER ALL; ALTER TABLE whole ENABLE TRIGGER fence_guard_insert",
            "whole insert O",
        ),
        ("ALTER TABLE whole ENABLE REPLICA TRIGGER fence_guard_delete", "whole delete R"),
        ("DROP TRIGGER fence_guard_attach ON whole", "whole attach"),
        ("ALTER TABLE part_1 DISABLE TRIGGER fence_guard_rows", "part_1 rows D"),
        ("DROP TRIGGER fence_guard_truncate ON part_2_1", "part_2_1 truncate"),
        (
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; \
             CREATE OR REPLACE TRIGGER fence_guard_insert AFTER INSERT ON whole EXECUTE FUNCTION nothing(); \
             ALTER TABLE whole ENABLE ALWAYS TRIGGER fence_guard_insert",
            "whole insert",
        ),
        (
            "ALTER TABLE parts DETACH PARTITION part_1",
            "part_1 attach,part_1 delete,part_1 insert,part_1 update",
        ),
    ];
    for (change, hole) in rows {
        Postgres::run(&mut conn, &format!("BEGIN; {change}")).await;
        let found = holes(&mut conn).await;
        assert!(found.join(",").contains(hole), "{change}: {found:?}");
        // Another call to `protect` repairs them.
        if !change.contains("DETACH") {
            Postgres::run(&mut conn, PROTECT).await;
            assert_eq!(holes(&mut conn).await, [""; 0], "{change}");
        }
        Postgres::run(&mut conn, "ROLLBACK").await;
    }
}

#[tokio::test]
async fn later_partition_is_protected_except_against_truncate() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let later = "CREATE TABLE part_4 PARTITION OF parts FOR VALUES IN ('e'); CREATE TABLE part_5 (LIKE parts); \
         INSERT INTO part_5 VALUES (1, 'f', 1); ALTER TABLE parts ATTACH PARTITION part_5 FOR VALUES IN ('f')";
    Postgres::run(&mut conn, later).await;
    for (write, partition, resource) in [
        ("INSERT INTO parts VALUES (1, 'e', 1)", "part_4", "e"),
        ("INSERT INTO part_4 VALUES (1, 'e', 1)", "part_4", "e"),
        ("DELETE FROM part_5", "part_5", "f"),
        ("UPDATE part_5 SET n = 2", "part_5", "f"),
        ("UPDATE parts SET n = 2 WHERE sku = 'f'", "part_5", "f"),
    ] {
        is_unfenced(&mut conn, write, partition, resource).await;
    }
    let unguarded = ["part_4 truncate", "part_5 truncate"];
    assert_eq!(holes(&mut conn).await, unguarded);
    Postgres::run(&mut conn, "BEGIN; TRUNCATE part_5; ROLLBACK").await;
    Postgres::run(&mut conn, "SELECT tower_fence.protect('parts', '{sku}')").await;
    is_unfenced(&mut conn, "TRUNCATE part_5", "part_5", "f").await;
    assert_eq!(holes(&mut conn).await, [""; 0]);
}

#[tokio::test]
async fn partitions_are_written_and_truncated_by_themselves() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    for (write, partition, resource) in [
        ("DELETE FROM part_1 WHERE id = 1", "part_1", "a"),
        ("INSERT INTO part_2 VALUES (9, 'c', 1)", "part_2_1", "c"),
        ("TRUNCATE part_2", "part_2", "c"),
        ("TRUNCATE part_2_1", "part_2_1", "c"),
        // A row that moves is deleted in one partition and inserted in another.
        ("UPDATE parts SET sku = 'd' WHERE id = 1", "part_1", "a"),
    ] {
        is_unfenced(&mut conn, write, partition, resource).await;
        let rolled_back = format!("{write}; ROLLBACK; BEGIN");
        run_admitted(&mut conn, [resource, "d"], &rolled_back).await;
    }
}

/// If the resource of one row was not admitted, a TRUNCATE reads no other row, whether or not there
/// is a bypass, and whether or not there is an index.
#[tokio::test]
async fn truncate_reads_one_row_if_its_resource_was_not_admitted() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let setup = "CREATE TABLE plain (sku text); CREATE TABLE indexed (sku text PRIMARY KEY); \
         INSERT INTO plain SELECT generate_series(1, 1000); INSERT INTO indexed TABLE plain; \
         SELECT tower_fence.protect('plain', '{sku}'), tower_fence.protect('indexed', '{sku}')";
    Postgres::run(&mut conn, setup).await;
    for table in ["plain", "indexed"] {
        // A scan of an index is not counted.
        let read = format!("SELECT pg_stat_get_xact_tuples_returned('{table}'::regclass)");
        let bypassed = format!("SELECT tower_fence.bypass('a test'); TRUNCATE {table}");
        let refused =
            format!("DO $$ BEGIN TRUNCATE {table}; EXCEPTION WHEN SQLSTATE 'TF428' THEN END $$");
        for truncate in [bypassed, refused] {
            Postgres::run(&mut conn, "BEGIN").await;
            let before = Postgres::number(&mut conn, &read).await.unwrap();
            Postgres::run(&mut conn, &truncate).await;
            let after = Postgres::number(&mut conn, &read).await.unwrap();
            Postgres::run(&mut conn, "ROLLBACK").await;
            assert_eq!(after - before, 1, "{truncate}");
        }
    }
}

#[tokio::test]
async fn protected_table_cannot_become_a_partition_or_child() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    Postgres::run(&mut conn, "CREATE TABLE forebear (LIKE whole)").await;
    for change in [
        "ALTER TABLE whole INHERIT forebear",
        "ALTER TABLE parts ATTACH PARTITION whole FOR VALUES IN ('z')",
    ] {
        let refused = execute(&mut conn, change).await.unwrap_err();
        assert_contains!(refused.message, "fence_guard_attach");
    }
}

#[tokio::test]
async fn foreign_keys_write_to_protected_tables_too() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let set_up = "CREATE TABLE orders (id int PRIMARY KEY); INSERT INTO orders VALUES (1), (2); \
         CREATE TABLE lines (sku text, n int REFERENCES orders ON DELETE CASCADE ON UPDATE CASCADE); \
         CREATE TABLE notes (sku text, n int REFERENCES orders ON DELETE SET NULL DEFERRABLE INITIALLY DEFERRED); \
         INSERT INTO lines VALUES ('x', 1); INSERT INTO notes VALUES ('y', 2)";
    let protect =
        "SELECT tower_fence.protect('lines', '{sku}'), tower_fence.protect('notes', '{sku}')";
    for sql in [set_up, protect] {
        Postgres::run(&mut conn, sql).await;
    }
    for (write, table, resource) in [
        ("DELETE FROM orders WHERE id = 1", "lines", "x"),
        ("UPDATE orders SET id = 3 WHERE id = 1", "lines", "x"),
        ("TRUNCATE orders CASCADE", "lines", "x"),
        ("DELETE FROM orders WHERE id = 2", "notes", "y"),
    ] {
        is_unfenced(&mut conn, write, table, resource).await;
        let rolled_back = format!("{write}; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK; BEGIN");
        run_admitted(&mut conn, ["x", "y"], &rolled_back).await;
    }
}

#[tokio::test]
async fn a_pattern_is_filled_from_the_columns_of_each_row() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let columns = "(id int, sku varchar(9), \"user\" text, relation text, unfenced uuid, \"Odd \"\"name\" text, \
         tg_op text, r int, flag boolean, gone int)";
    let set_up = format!(
        "CREATE SEQUENCE tokens; \
         CREATE TABLE whole {columns}; CREATE TABLE parts {columns} PARTITION BY RANGE (id); \
         CREATE TABLE part PARTITION OF parts DEFAULT"
    );
    Postgres::run(&mut conn, &set_up).await;
    let row = "(7, 'sku-1', 'me', 'cd', '00000000-0000-0000-0000-000000000001', 'odd', 'op', 3, false, 0)";
    for (table, written) in [("whole", "whole"), ("parts", "part")] {
        for (pattern, expected) in [
            ("it's 100% \\ \"/{sku}", "it's 100% \\ \"/sku-1"),
            ("order/{id}", "order/7"),
            // The pattern refers to the column, and not to the role of the session.
            ("{user}", "me"),
            ("{Odd \"name}", "odd"),
            (
                "{relation}:{unfenced}",
                "cd:00000000-0000-0000-0000-000000000001",
            ),
            ("{tg_op}/{r}", "op/3"),
            ("{flag}", "false"),
            ("{id}-{id}", "7-7"),
            ("all", "all"),
            ("show/{id}/seat/{sku}", "show/7/seat/sku-1"),
        ] {
            let protect = sqlx::query("SELECT tower_fence.protect($1::regclass, $2)");
            let protect = protect.bind(table).bind(pattern).execute(&mut *conn).await;
            protect.unwrap_or_else(|error| panic!("{pattern}: {error}"));
            let insert = format!("INSERT INTO {table} VALUES {row}");
            is_unfenced(&mut conn, &insert, written, expected).await;
            let quoted = expected.replace('\'', "''");
            let written = format!("{insert}; DELETE FROM {table}");
            run_admitted(&mut conn, [&quoted], &written).await;
            let shown = format!(
                "SELECT DISTINCT pattern FROM tower_fence.protected_tables WHERE relation = '{table}'::regclass"
            );
            let shown: String = read(&mut *conn, &shown).await;
            assert_eq!(shown, pattern);
        }
        // A row without a value in a column of the pattern has no resource.
        let nameless = format!("INSERT INTO {table} (id) VALUES (1)");
        let refused = refuses(&mut conn, &nameless, "TF428").await;
        assert_contains!(
            refused.message,
            "has no resource: a column of its pattern is null"
        );
        // This session has already written to the table.
        let change = format!("ALTER TABLE {table} DROP COLUMN gone, ADD COLUMN came int");
        Postgres::run(&mut conn, &change).await;
        let insert = format!("INSERT INTO {table} (id, sku) VALUES (6, 'b')");
        is_unfenced(&mut conn, &insert, written, "show/6/seat/b").await;
    }
}

#[tokio::test]
async fn a_renamed_or_dropped_column_of_the_pattern_is_named() {
    for change in ["RENAME COLUMN sku TO article", "DROP COLUMN sku CASCADE"] {
        let db = with_tables().await;
        let mut conn = db.pool.acquire().await.unwrap();
        Postgres::run(&mut conn, &format!("ALTER TABLE whole {change}")).await;
        for write in [
            "UPDATE whole SET n = 0",
            "DELETE FROM whole",
            "INSERT INTO whole VALUES (9, '7')",
            "TRUNCATE whole",
        ] {
            let write = format!("{}{write}", admissions(["a"]));
            let refused = refuses(&mut conn, &write, "42703").await;
            let expected = "the pattern of the protected table public.whole names a column that was renamed, dropped or retyped";
            assert!(refused.message.starts_with(expected), "{refused:?}");
            assert_contains!(refused.hint, "tower_fence.protect()");
        }
        let missing = "SELECT count(*) FROM tower_fence.protected_tables \
             WHERE relation = 'whole'::regclass AND missing_columns = '{sku}'";
        assert_eq!(db.number(missing).await, 5, "{change}");
        Postgres::run(&mut conn, "SELECT tower_fence.protect('whole', 'row/{id}')").await;
        assert_eq!(db.number(missing).await, 0, "{change}");
        let write = "UPDATE whole SET n = 0 WHERE id = 1";
        is_unfenced(&mut conn, write, "whole", "row/1").await;
    }
    // The same holds for a partitioned table.
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    Postgres::run(&mut conn, "ALTER TABLE parts RENAME COLUMN sku TO article").await;
    for write in [
        "UPDATE parts SET n = 0",
        "DELETE FROM part_1",
        "TRUNCATE parts",
    ] {
        let write = format!("{}{write}", admissions(["a"]));
        let refused = refuses(&mut conn, &write, "42703").await;
        assert_contains!(refused.message, "renamed, dropped or retyped");
    }
}

/// The session has already written to the tables.
#[tokio::test]
async fn a_retyped_column_of_the_pattern_is_named() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let protect = "SELECT tower_fence.protect('whole', '{n}'), tower_fence.protect('parts', '{n}')";
    Postgres::run(&mut conn, protect).await;
    let whole = "DELETE FROM whole WHERE id = 1";
    let part = "DELETE FROM parts WHERE id = 1";
    is_unfenced(&mut conn, whole, "whole", "1").await;
    is_unfenced(&mut conn, part, "part_1", "1").await;
    let retype = "ALTER TABLE whole ALTER n TYPE bigint; ALTER TABLE parts ALTER n TYPE bigint";
    Postgres::run(&mut conn, retype).await;
    is_unfenced(&mut conn, whole, "whole", "1").await;
    let refused = refuses(&mut conn, part, "42804").await;
    assert_contains!(refused.message, "renamed, dropped or retyped");
    Postgres::run(&mut conn, protect).await;
    is_unfenced(&mut conn, part, "part_1", "1").await;

    let setup = "CREATE TABLE flags (flag boolean); SELECT tower_fence.protect('flags', '{flag}'); \
         ALTER TABLE flags ALTER flag TYPE date USING now()";
    Postgres::run(&mut conn, setup).await;
    let write = "INSERT INTO flags VALUES (now())";
    let refused = refuses(&mut conn, write, "22P02").await;
    assert_contains!(refused.message, "renamed, dropped or retyped");
}

#[tokio::test]
async fn a_row_without_a_resource_is_written_with_a_bypass_only() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    for (sku, fault) in [
        ("''", "cannot be empty"),
        ("repeat('x', 256)", "at most 255 bytes, not 256"),
        ("E'a\\tb'", "must not contain control characters"),
    ] {
        for (table, written) in [("whole", "whole"), ("parts", "part_3")] {
            let write = format!("INSERT INTO {table} VALUES (9, {sku}, 1)");
            let refused = refuses(&mut conn, &write, "TF428").await;
            let expected = format!("a row of public.{written} has no resource: ");
            assert!(refused.message.starts_with(&expected), "{refused:?}");
            assert_contains!(refused.message, fault);
            assert_contains!(refused.hint, "tower_fence.bypass()");
            assert!(!refused.hint.contains("tower_fence.admit()"), "{refused:?}");
            let bypassed = format!("SELECT tower_fence.bypass('a test'); {write}");
            run_admitted(&mut conn, [], &bypassed).await;
        }
    }
}

/// `DROP SCHEMA` removes a trigger function in the previous schema, and the triggers with it.
#[tokio::test]
async fn a_table_in_another_schema_gets_a_guard_there() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let setup = "CREATE SCHEMA former; ALTER TABLE whole SET SCHEMA former; ALTER TABLE parts SET SCHEMA former; \
         SELECT tower_fence.protect('former.whole', '{sku}'), tower_fence.protect('former.parts', '{sku}'); \
         ALTER TABLE former.whole SET SCHEMA public; ALTER TABLE former.parts SET SCHEMA public";
    Postgres::run(&mut conn, setup).await;
    let without_guard = holes(&mut conn).await;
    assert_eq!(without_guard.len(), 15, "{without_guard:?}");
    Postgres::run(&mut conn, PROTECT).await;
    assert_eq!(holes(&mut conn).await, [""; 0]);
    Postgres::run(&mut conn, "DROP SCHEMA former CASCADE").await;
    for (table, written) in [("whole", "whole"), ("parts", "part_1")] {
        let write = format!("UPDATE {table} SET n = 0 WHERE id = 1");
        is_unfenced(&mut conn, &write, written, "a").await;
    }
}

/// PL/pgSQL reserves these names, and SQL does not.
#[tokio::test]
async fn pattern_may_name_columns_with_reserved_names() {
    for column in ["begin", "loop", "strict", "we\"ird"] {
        let db = with_tables().await;
        let mut conn = db.pool.acquire().await.unwrap();
        let quoted = column.replace('"', "\"\"");
        let setup = format!(
            "CREATE TABLE odd (\"{quoted}\" text, n int) PARTITION BY LIST (n); \
             CREATE TABLE odd_1 PARTITION OF odd FOR VALUES IN (1); \
             SELECT tower_fence.protect('odd', '{{{column}}}')"
        );
        Postgres::run(&mut conn, &setup).await;
        run_admitted(&mut conn, ["a"], "INSERT INTO odd VALUES ('a', 1)").await;
        let write = format!("{}UPDATE odd SET n = 1", admissions(["b"]));
        is_unfenced(&mut conn, &write, "odd_1", "a").await;
    }
}

/// The names of these columns are also those of variables of the guard, of functions, and of the
/// table.
#[tokio::test]
async fn renamed_column_is_not_mistaken_for_something_else() {
    for column in "tg_table_name tg_op found new unfenced fence_rows count pg_typeof to_json \
        concat odd"
        .split(' ')
    {
        let db = with_tables().await;
        let mut conn = db.pool.acquire().await.unwrap();
        let setup = format!(
            "CREATE TABLE odd ({column} text, n int); INSERT INTO odd VALUES ('a', 1), ('b', 2); \
             SELECT tower_fence.protect('odd', 'f/{{{column}}}')"
        );
        Postgres::run(&mut conn, &setup).await;
        let write = format!("{}UPDATE odd SET n = 0", admissions(["f/a"]));
        is_unfenced(&mut conn, &write, "odd", "f/b").await;
        let rename = format!("ALTER TABLE odd RENAME COLUMN {column} TO lost");
        Postgres::run(&mut conn, &rename).await;
        let names = [
            "odd", "false", "UPDATE", "1", "2", "text", "(a,0)", "(b,0)", "a", "b",
        ];
        let admitted = names.map(|name| format!("f/{name}"));
        let admitted = admissions(admitted.each_ref().map(String::as_str));
        for write in ["UPDATE odd SET n = 0", "DELETE FROM odd", "TRUNCATE odd"] {
            let write = format!("{admitted}{write}");
            refuses(&mut conn, &write, "42703").await;
        }
    }
}

#[tokio::test]
async fn detached_partition_gets_a_guard_of_its_own() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let setup = "CREATE TABLE live (k int, s text) PARTITION BY LIST (k); \
         CREATE TABLE live_1 PARTITION OF live FOR VALUES IN (1) PARTITION BY LIST (s); \
         CREATE TABLE live_1_a PARTITION OF live_1 DEFAULT; \
         CREATE TABLE live_2 PARTITION OF live FOR VALUES IN (2); \
         CREATE TABLE live_3 PARTITION OF live FOR VALUES IN (3); \
         INSERT INTO live VALUES (1, 'a'), (2, 'b'); \
         SELECT tower_fence.protect('live', 'live/{s}'); \
         ALTER TABLE live DETACH PARTITION live_1; \
         SELECT tower_fence.protect('live_1', 'archive'); \
         ALTER TABLE live DETACH PARTITION live_3; \
         SELECT tower_fence.unprotect('live_3')";
    Postgres::run(&mut conn, setup).await;
    let write = format!("{}UPDATE live SET k = 2", admissions(["archive"]));
    is_unfenced(&mut conn, &write, "live_2", "live/b").await;
    run_admitted(&mut conn, ["live/b"], "UPDATE live SET k = 2").await;
    run_admitted(&mut conn, ["archive"], "UPDATE live_1 SET k = 1").await;
    assert_eq!(holes(&mut conn).await, [""; 0]);
}

#[tokio::test]
async fn unprotect_removes_triggers_of_a_former_root() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let setup = "CREATE TABLE live (s text) PARTITION BY LIST (s); CREATE TABLE archive (s text) PARTITION BY LIST (s); \
         CREATE TABLE live_a PARTITION OF live FOR VALUES IN ('a'); INSERT INTO live VALUES ('a')";
    Postgres::run(&mut conn, setup).await;
    for is_protected in [false, true] {
        let protect = match is_protected {
            false => "",
            true => "SELECT tower_fence.protect('archive', 'archive/{s}');",
        };
        let attach = format!(
            "SELECT tower_fence.protect('live', '{{s}}'); ALTER TABLE live DETACH PARTITION live_a; \
             {protect} ALTER TABLE archive ATTACH PARTITION live_a FOR VALUES IN ('a')"
        );
        Postgres::run(&mut conn, &attach).await;
        is_unfenced(&mut conn, "TRUNCATE live_a", "live_a", "a").await;
        let partition = "SELECT tower_fence.unprotect('live_a')";
        let refused = refuses(&mut conn, partition, "42809").await;
        assert!(
            refused
                .message
                .ends_with("call tower_fence.unprotect('public.archive')"),
            "{refused:?}"
        );
        for (table, was_protected) in [("archive", true), ("archive", false), ("live", true)] {
            let unprotect = format!("SELECT tower_fence.unprotect('{table}')");
            let removed: bool = read(&mut *conn, &unprotect).await;
            assert_eq!(removed, was_protected, "{table}, {is_protected}");
            Postgres::run(&mut conn, "BEGIN; TRUNCATE archive; ROLLBACK").await;
        }
        let guards = "SELECT count(*) FROM pg_proc WHERE proname ~ '^fence_guard_(live|archive)'";
        assert_eq!(read::<i64>(&mut *conn, guards).await, 0);
        let back = "ALTER TABLE archive DETACH PARTITION live_a; \
             ALTER TABLE live ATTACH PARTITION live_a FOR VALUES IN ('a')";
        Postgres::run(&mut conn, back).await;
    }
}

#[tokio::test]
async fn error_names_tables_that_cannot_be_protected() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let set_up = "CREATE VIEW seen AS TABLE whole; CREATE MATERIALIZED VIEW kept AS TABLE whole; \
         CREATE TEMPORARY TABLE mine (sku text); CREATE TABLE old (sku text); CREATE TABLE young () INHERITS (old); \
         CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w; \
         CREATE FOREIGN TABLE far (sku text) SERVER s; CREATE TABLE half (sku text) PARTITION BY LIST (sku); \
         CREATE FOREIGN TABLE half_far PARTITION OF half DEFAULT SERVER s";
    Postgres::run(&mut conn, set_up).await;
    for (arguments, code) in [
        ("'seen', '{sku}'", "42809"),
        ("'kept', '{sku}'", "42809"),
        ("'far', '{sku}'", "42809"),
        ("'half', '{sku}'", "42809"),
        ("'tokens', '{last_value}'", "42809"),
        ("'mine', '{sku}'", "42809"),
        ("'old', '{sku}'", "42809"),
        ("'young', '{sku}'", "42809"),
        ("'part_1', '{sku}'", "42809"),
        ("'pg_class', '{relname}'", "42809"),
        ("'tower_fence.resources', '{resource}'", "42809"),
        ("'tower_fence.bypasses', '{reason}'", "42809"),
        ("'nowhere', '{sku}'", "42P01"),
        ("1::oid::regclass, '{sku}'", "22004"),
        ("NULL, '{sku}'", "22004"),
        ("'whole', NULL", "22004"),
        ("'whole', ''", "22023"),
        ("'whole', '{}'", "22023"),
        ("'whole', '{sku'", "22023"),
        ("'whole', 'sku}'", "22023"),
        ("'whole', '{{sku}}'", "22023"),
        ("'whole', E'a\\tb{sku}'", "22023"),
        ("'whole', E'{sku}\\u0085'", "22023"),
        ("'whole', '{nothing}'", "42703"),
        ("'whole', '{SKU}'", "42703"),
        ("'whole', '{sku }'", "42703"),
        ("'whole', '{sku || n}'", "42703"),
        ("'whole', '{whole}'", "42703"),
        ("'whole', '{tableoid}'", "42703"),
        ("'whole', '{ctid}'", "42703"),
    ] {
        let protect = format!("SELECT tower_fence.protect({arguments})");
        let refused = refuses(&mut conn, &protect, code).await;
        if arguments.contains("far") || arguments.contains("half") {
            let reason = "postgres_fdw commits the remote side first and separately";
            assert_contains!(refused.message, reason);
        }
    }
    refuses(&mut conn, "SELECT tower_fence.unprotect('part_1')", "42809").await;
    // The tables that were already protected remain protected.
    assert_eq!(holes(&mut conn).await, [""; 0]);
    is_unfenced(&mut conn, "DELETE FROM whole WHERE sku = 'a'", "whole", "a").await;
}

#[tokio::test]
async fn removed_protection_restores_the_table() {
    let db = with_tables().await;
    let mut conn = db.pool.acquire().await.unwrap();
    let made = "SELECT (SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'fence%') \
         + (SELECT count(*) FROM pg_proc WHERE prorettype = 'trigger'::regtype AND proname LIKE 'fence%')";
    assert_eq!(db.number(made).await, 5 + 2 * 5 + 2);
    let again = "SELECT tower_fence.protect('whole', '{id}'), tower_fence.protect('parts', '{id}')";
    Postgres::run(&mut conn, again).await;
    assert_eq!(db.number(made).await, 5 + 2 * 5 + 2);
    let remove = "SELECT tower_fence.unprotect('whole'), tower_fence.unprotect('parts'), tower_fence.unprotect('twin')";
    Postgres::run(&mut conn, remove).await;
    assert_eq!(db.number(made).await, 0);
    assert_eq!(db.count("tower_fence.protected_tables").await, 0);
    Postgres::run(&mut conn, "DELETE FROM whole; TRUNCATE parts; ALTER TABLE parts ATTACH PARTITION whole FOR VALUES IN ('z')").await;
    assert_eq!(rows(&mut conn, "parts").await, "");
}

#[tokio::test]
async fn tables_of_any_name_and_schema_are_protected() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    Postgres::run(
        &mut conn,
        "CREATE SEQUENCE tokens; CREATE SCHEMA \"odd \"\"schema\"",
    )
    .await;
    let names = [
        "new",
        "old",
        "fence_new",
        "r",
        "f",
        "select",
        "A \"b\".c",
        "it's %s",
        "pg_class",
        &format!("{}_1", "x".repeat(60)),
        &format!("{}_2", "x".repeat(60)),
        &"ä".repeat(31),
    ];
    let partition = "CREATE TABLE {s}.part_{i} PARTITION OF {t} DEFAULT;";
    for schema in ["\"odd \"\"schema\"", "public"] {
        for (number, name) in names.iter().enumerate() {
            let table = format!("{schema}.\"{}\"", name.replace('"', "\"\""));
            let literal = table.replace('\'', "''");
            let resource = format!("{number}-a");
            for (kind, partition) in [("", ""), ("PARTITION BY LIST (sku)", partition)] {
                let partition = partition.replace("{s}", schema).replace("{t}", &table);
                let partition = partition.replace("{i}", &number.to_string());
                let protect =
                    format!("SELECT tower_fence.protect('{literal}', '{number}-{{sku}}')");
                let set_up = format!(
                    "CREATE TABLE {table} (sku text, n int) {kind}; {partition} {protect}; {protect}"
                );
                Postgres::run(&mut conn, &set_up).await;
                for write in [
                    "INSERT INTO {t} VALUES ('a', 1)",
                    "UPDATE {t} SET n = 2",
                    "DELETE FROM {t}",
                    "INSERT INTO {t} VALUES ('a', 1)",
                    "TRUNCATE {t}",
                ] {
                    let write = write.replace("{t}", &table);
                    refuses(&mut conn, &write, "TF428").await;
                    run_admitted(&mut conn, [&resource], &write).await;
                }
                // The first table is dropped, because the partitioned table has the same name. The
                // partitioned tables remain for the count of functions below.
                if partition.is_empty() {
                    let remove =
                        format!("SELECT tower_fence.unprotect('{literal}'); DROP TABLE {table}");
                    Postgres::run(&mut conn, &remove).await;
                }
            }
        }
    }
    let guards = "SELECT count(DISTINCT function) FROM tower_fence.protected_tables";
    assert_eq!(db.number(guards).await, 2 * names.len() as i64);
}
