//! `fence_partition_resources`: a table that is divided while it is in use.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use sqlx::Postgres;
use tower_fence::{Fence, Resource, TokenUse};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    fence::{is_stale, sku, token, write},
    functions::{admit, execute},
};

const DIVIDE: &str = "SELECT fence_partition_resources(4)";

async fn parts(db: &Fresh<Postgres>) -> i64 {
    let parts = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'fence_resources'::regclass";
    db.number(parts).await
}

/// Writers in several processes, in functions and with single statements, whose statements are prepared.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_and_nothing_dead_comes_alive_while_it_is_divided() {
    let db = Arc::new(Postgres::fresh(8).await);
    let done = Arc::new(AtomicBool::new(false));
    // Nobody writes to this one meanwhile.
    write(&db.fence(), 9).await.unwrap();
    let writers = (0..4).map(|number| {
        let (db, done) = (Arc::clone(&db), Arc::clone(&done));
        tokio::spawn(async move {
            let fence = db.fence();
            let mut last = 0;
            while !done.load(SeqCst) {
                last += 1;
                let resource = Resource::new(format!("r-{number}-{}", last % 5)).unwrap();
                if number == 0 {
                    let mut conn = db.pool.acquire().await.unwrap();
                    admit(&mut conn, resource.as_str(), last).await.unwrap();
                } else {
                    one_write(&fence, &resource, last).await;
                }
            }
            (number, last)
        })
    });
    let writers: Vec<_> = writers.collect();
    eventually("they write", async || db.entries().await > 20).await;
    db.execute(DIVIDE).await;
    let before = db.entries().await;
    eventually("they go on", async || db.entries().await > before + 20).await;
    done.store(true, SeqCst);
    let mut of_the_fence = 0;
    for writer in writers {
        let (number, last) = writer.await.unwrap();
        of_the_fence += if number == 0 { 0 } else { last };
        for token in (last - 4).max(1)..=last {
            let resource = Resource::new(format!("r-{number}-{}", token % 5)).unwrap();
            let dead = db.fence().inspect(&resource).await.unwrap();
            assert_eq!(dead, Some(token), "{resource}");
        }
    }
    is_stale(write(&db.fence(), 9).await, 9, 9);
    assert_eq!(db.entries().await, 1 + of_the_fence);
    assert_eq!(parts(&db).await, 4);
    assert_eq!(
        db.number("SELECT count(*) FROM ONLY fence_resources").await,
        0
    );
}

async fn one_write(fence: &Fence<Postgres>, resource: &Resource, value: i64) {
    let insert = "INSERT INTO ledger SELECT $1 FROM fence RETURNING entry";
    let entry = rand::random::<i64>();
    let query = sqlx::query(insert).bind(entry);
    let written = fence.write::<(i64,)>(resource, token(value), TokenUse::SingleUse, query);
    assert_eq!(written.await.unwrap(), [(entry,)]);
}

/// Those that were granted on the table, and no others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_and_rows_are_those_of_before() {
    let db = Postgres::fresh(2).await;
    let role = format!("app_{:016x}", rand::random::<u64>());
    write(&db.fence(), 7).await.unwrap();
    db.execute(&format!(
        "CREATE ROLE {role}; GRANT SELECT ON fence_resources TO {role}; \
         GRANT UPDATE (max_token) ON fence_resources TO {role} WITH GRANT OPTION; \
         ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO {role}; \
         ALTER TABLE fence_resources SET (fillfactor = 55, autovacuum_enabled = off)"
    ))
    .await;
    const RIGHTS: &str = "SELECT count(*) FROM pg_class AS c WHERE c.oid = 'fence_resources'::regclass \
        AND c.relacl::text LIKE '%{role}=r/%' AND has_column_privilege('{role}', c.oid, 'max_token', \
            'UPDATE WITH GRANT OPTION') AND NOT has_column_privilege('{role}', c.oid, 'resource', 'UPDATE') \
        AND NOT has_table_privilege('{role}', c.oid, 'DELETE')";
    let rights = RIGHTS.replace("{role}", &role);
    assert_eq!(db.number(&rights).await, 1);
    db.execute(DIVIDE).await;
    assert_eq!(db.number(&rights).await, 1);
    let leaves = format!(
        "SELECT count(*) FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid \
         WHERE i.inhparent = 'fence_resources'::regclass \
             AND c.reloptions = '{{fillfactor=55,autovacuum_enabled=off}}' \
             AND NOT has_any_column_privilege('{role}', c.oid, 'SELECT')"
    );
    assert_eq!(db.number(&leaves).await, 4);
    let stale = write(&db.fence(), 7).await;
    is_stale(stale, 7, 7);
    assert_eq!(db.fence().inspect(&sku()).await.unwrap(), Some(7));
    db.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await;
}

/// Whoever divides the table.
#[tokio::test]
async fn its_owner_stays_its_owner_and_keeps_all_rights() {
    let role = format!("owner_{:016x}", rand::random::<u64>());
    for by_owner in [false, true] {
        let db = Postgres::fresh(2).await;
        let mut conn = db.pool.acquire().await.unwrap();
        // Without default privileges a new table tells no rights at all.
        let begin = format!(
            "CREATE ROLE {role}; GRANT CREATE ON SCHEMA public TO {role}; \
             GRANT EXECUTE ON FUNCTION fence_partition_resources TO {role}; \
             ALTER TABLE fence_resources OWNER TO {role}; \
             ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO PUBLIC; \
             ALTER DEFAULT PRIVILEGES FOR ROLE {role} GRANT SELECT ON TABLES TO PUBLIC"
        );
        execute(&mut conn, &begin).await.unwrap();
        if by_owner {
            let set_role = format!("SET ROLE {role}");
            execute(&mut conn, &set_role).await.unwrap();
        }
        execute(&mut conn, DIVIDE).await.unwrap();
        execute(&mut conn, "RESET ROLE").await.unwrap();
        let whole = format!(
            "SELECT count(*) FROM pg_partition_tree('fence_resources') AS t JOIN pg_class AS c ON c.oid = t.relid \
             WHERE pg_get_userbyid(c.relowner) = '{role}' AND NOT has_table_privilege('public', c.oid, 'SELECT') \
                 AND has_table_privilege('{role}', c.oid, 'SELECT') \
                 AND has_table_privilege('{role}', c.oid, 'INSERT') \
                 AND has_table_privilege('{role}', c.oid, 'UPDATE') \
                 AND has_table_privilege('{role}', c.oid, 'DELETE')"
        );
        assert_eq!(db.number(&whole).await, 5, "{by_owner}");
        let end = format!("DROP OWNED BY {role}; DROP ROLE {role}");
        execute(&mut conn, &end).await.unwrap();
    }
}

#[tokio::test]
async fn what_cannot_be_divided_stays_as_it_is() {
    let db = Postgres::fresh(2).await;
    let mut conn = db.pool.acquire().await.unwrap();
    for refused in [
        "SELECT fence_partition_resources(1)",
        "SELECT fence_partition_resources(NULL)",
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT fence_partition_resources(4); COMMIT",
    ] {
        execute(&mut conn, refused).await.unwrap_err();
        execute(&mut conn, "ROLLBACK").await.unwrap();
    }
    execute(
        &mut conn,
        "CREATE VIEW somebodys AS SELECT * FROM fence_resources",
    )
    .await
    .unwrap();
    execute(&mut conn, DIVIDE).await.unwrap_err();
    assert_eq!(parts(&db).await, 0);
    write(&db.fence(), 5).await.unwrap();
    execute(&mut conn, "DROP VIEW somebodys").await.unwrap();
    execute(&mut conn, DIVIDE).await.unwrap();
    let again = execute(&mut conn, DIVIDE).await.unwrap_err();
    assert_eq!(again.message, "fence_resources is no plain table");
    assert_eq!(parts(&db).await, 4);
    is_stale(write(&db.fence(), 5).await, 5, 5);
}
