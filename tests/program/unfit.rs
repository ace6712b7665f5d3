//! A fence that is unfit for use is refused at the start.

use sqlx::{Connection, PgConnection, Postgres};

use super::program::{Ended, Served, program, run, run_on};
use crate::support::{
    database::{Fresh, TestDatabase},
    process::Process,
};

const SERVE: [&str; 3] = ["serve", "--listen", "127.0.0.1:0"];

/// Grants the rights that a dump without privileges leaves to PUBLIC.
async fn open_to_public(db: &Fresh<Postgres>) {
    db.execute("GRANT EXECUTE ON FUNCTION tower_fence.admit, tower_fence.bypass TO PUBLIC")
        .await;
}

#[tokio::test]
async fn functions_that_public_may_execute_are_refused_at_start() {
    let db = Postgres::fresh(2).await;
    run_on(&db.url, &["check"]).await.is(0);
    open_to_public(&db).await;
    for arguments in [&SERVE[..], &["check"]] {
        let refused = run_on(&db.url, arguments).await;
        refused.is(78).says("PUBLIC may execute admit, bypass,");
        refused.says("run `tower-fence migrate`");
    }
    let migrated = run_on(&db.url, &["migrate"]).await;
    let says = &migrated.is(0).stdout;
    assert!(says.ends_with(" were created or updated\n"), "{says}");
    run_on(&db.url, &["check"]).await.is(0);
    let server = Served::start(&db.url, &[]).await;
    assert_eq!(server.get("/readyz").await.status, 200);
    // A server with `--migrate` revokes the rights.
    open_to_public(&db).await;
    let changed = "created or updated the tables, functions and privileges";
    let server = Served::start(&db.url, &["--migrate"]).await;
    server.logs(changed).await;
    run_on(&db.url, &["check"]).await.is(0);
    let server = Served::start(&db.url, &["--migrate"]).await;
    server.logs("started").await;
    assert!(!server.log().contains(changed), "{}", server.log());
}

/// A server with a misspelt schema would count its tokens apart from the other servers.
#[tokio::test]
async fn second_fence_in_a_database_is_reported_when_it_is_created() {
    let db = Postgres::fresh(2).await;
    let misspelt = ["--migrate", "--database-schema", "tower_fense"];
    let checked = run_on(&db.url, &["check", misspelt[1], misspelt[2]]).await;
    let missing = "the tables of the fence are missing or outdated";
    checked.is(78).says(missing);
    let empty = "this database has a fence in the schema tower_fence: `tower-fence migrate` would \
         create an empty fence in the schema tower_fense";
    assert_contains!(checked.stdout, empty);
    for is_created in [true, false] {
        let server = Served::start(&db.url, &misspelt).await;
        server.logs("started").await;
        let log = server.log();
        let warned = log.contains("this database also has a fence in another schema");
        assert_eq!(warned, is_created, "{log}");
        assert_eq!(log.contains("others=tower_fence"), is_created, "{log}");
    }
}

/// The server may start before the migrations of its version have run.
#[tokio::test]
async fn outdated_tables_are_refused_at_start() {
    let db = Postgres::fresh(2).await;
    // The last migration creates this table.
    db.execute("DROP TABLE tower_fence.commit_marks").await;
    for arguments in [&SERVE[..], &["check"]] {
        let refused = run_on(&db.url, arguments).await;
        refused.is(78).says("run `tower-fence migrate`");
    }
}

/// A provider of hosted Postgres may withhold the right to execute the function that reports the
/// timeline.
#[tokio::test]
async fn hidden_timeline_is_migrated_only_if_configured() {
    let db = Postgres::fresh(2).await;
    let own = "DROP SCHEMA tower_fence CASCADE; CREATE SCHEMA own AUTHORIZATION {role}; \
         REVOKE EXECUTE ON FUNCTION pg_walfile_name FROM PUBLIC";
    let role = db.role(own).await;
    let variables = [
        ("TOWER_FENCE_DATABASE_URL", role.url.as_str()),
        ("TOWER_FENCE_DATABASE_SCHEMA", "own"),
    ];
    let refused = run(&["migrate"], &variables).await;
    let reason = "no failover can be detected: permission denied for function pg_walfile_name";
    refused.is(78).says(reason).says("--no-failover-detection");
    // The migration history is dropped, and the script creates it again.
    db.execute("DROP TABLE own.migrations").await;
    let detects = ["schema", "--database-schema", "own"];
    let script = |ended: Ended| ended.is(0).stdout.clone();
    let detecting = script(run(&detects, &[]).await);
    let printed = script(run(&["schema", "--no-failover-detection"], &variables).await);
    let mut conn = role.connect().await;
    Postgres::execute(&mut conn, &detecting).await.unwrap_err();
    Postgres::run(&mut conn, "ROLLBACK").await;
    Postgres::run(&mut conn, &printed).await;
    for arguments in [&["migrate", "--no-failover-detection"][..], &["migrate"]] {
        run(arguments, &variables).await.is(0);
    }
    let migrate = async |schema| {
        let arguments = ["migrate", "--database-schema", schema];
        run_on(&db.url, &arguments).await
    };
    let refused = migrate("own").await;
    refused
        .is(78)
        .says(&format!("the schema own belongs to the role {}", role.name));
    refused.says("Migrate as the owner of the schema");
    migrate("second").await.is(0);
    let keyword = migrate("user").await;
    keyword
        .is(78)
        .says("syntax error at or near")
        .says("keyword of SQL");
    let checked = run(&["check"], &variables).await;
    for finding in [
        format!("own belongs to the role {}", role.name),
        "this database also has a fence in the schema second".into(),
        "call own.after_failover() after each promotion and each restore".into(),
    ] {
        assert_contains!(checked.is(0).stdout, &finding);
    }
    let unnoticed = "SELECT count(*) FROM own.floors WHERE history = ''";
    assert_eq!(db.number(unnoticed).await, 256);
}

/// A standby, which is read-only, can be promoted.
#[tokio::test]
async fn migration_of_a_read_only_database_can_be_retried() {
    let db = Postgres::fresh(2).await;
    db.execute("DROP SCHEMA tower_fence CASCADE").await;
    let read_only = format!("{}?options=-c%20default_transaction_read_only%3Don", db.url);
    for arguments in [&["migrate"][..], &[&SERVE[..], &["--migrate"]].concat()] {
        let refused = run_on(&read_only, arguments).await;
        refused.is(69).says("in a read-only transaction");
    }
    run_on(&db.url, &["migrate"]).await.is(0);
}

#[tokio::test]
async fn fence_found_unfit_later_stops_the_server() {
    let db = Postgres::fresh(2).await;
    open_to_public(&db).await;
    let (server, name) = db.url.rsplit_once('/').unwrap();
    let other = PgConnection::connect(&format!("{server}/postgres"));
    let mut other = other.await.unwrap();
    let mut allow = async |allowed: bool| {
        let sql = format!("ALTER DATABASE {name} ALLOW_CONNECTIONS {allowed}");
        Postgres::run(&mut other, &sql).await;
    };
    allow(false).await;
    let mut command = program();
    command.args(SERVE).env("TOWER_FENCE_DATABASE_URL", &db.url);
    let mut server = Process::run(command);
    server.prints("tower-fence listens on ", 1).await;
    allow(true).await;
    assert_eq!(server.exit().await.code(), Some(78));
    assert_contains!(server.log(), "PUBLIC may execute");
}
