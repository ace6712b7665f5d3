//! A fence that is unfit for use is refused at the start.

use sqlx::{Connection, PgConnection, Postgres};

use super::program::{Served, program, run};
use crate::support::{
    database::{Fresh, TestDatabase},
    process::Process,
};

const SERVE: [&str; 3] = ["serve", "--listen", "127.0.0.1:0"];

/// As a dump without rights leaves it.
async fn open_to_public(db: &Fresh<Postgres>) {
    db.execute("GRANT EXECUTE ON FUNCTION fence_admit, fence_bypass TO PUBLIC")
        .await;
}

#[tokio::test]
async fn functions_that_public_may_execute_are_refused_at_start() {
    let db = Postgres::fresh(2).await;
    let variables = [("TOWER_FENCE_DATABASE_URL", db.url.as_str())];
    run(&["check"], &variables).await.is(0);
    open_to_public(&db).await;
    for arguments in [&SERVE[..], &["check"]] {
        let refused = run(arguments, &variables).await;
        refused
            .is(78)
            .says("PUBLIC may execute fence_admit, fence_bypass,")
            .says("run `tower-fence migrate`");
    }
    run(&["migrate"], &variables).await.is(0);
    run(&["check"], &variables).await.is(0);
    let server = Served::start(&db.url, &[]).await;
    assert_eq!(server.get("/readyz").await.status, 200);
    // A server that migrates revokes it by itself.
    open_to_public(&db).await;
    Served::start(&db.url, &["--migrate"]).await;
    run(&["check"], &variables).await.is(0);
}

#[tokio::test]
async fn a_fence_that_is_found_unfit_later_ends_the_server() {
    let db = Postgres::fresh(2).await;
    open_to_public(&db).await;
    let (server, name) = db.url.rsplit_once('/').unwrap();
    let mut other = PgConnection::connect(&format!("{server}/postgres"))
        .await
        .unwrap();
    let mut allow = async |allowed: bool| {
        let sql = format!("ALTER DATABASE {name} ALLOW_CONNECTIONS {allowed}");
        let allowed = sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut other);
        allowed.await.unwrap();
    };
    allow(false).await;
    let mut command = program();
    command.args(SERVE).env("TOWER_FENCE_DATABASE_URL", &db.url);
    let mut server = Process::run(command);
    server.prints("tower-fence listens on ", 1).await;
    allow(true).await;
    assert_eq!(server.exit().await.code(), Some(78));
    let log = server.log();
    assert!(log.contains("PUBLIC may execute"), "{log}");
}
