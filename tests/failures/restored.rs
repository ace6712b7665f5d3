//! A Postgres server that crashes, stops, or is restored from a backup under load.

use std::process::Command;

use super::answered::{Outcome, fence, outcome, server};
use crate::support::{
    postgres::PostgresServer,
    proxy::{Link, Proxy},
    standby::execute,
};

#[derive(Clone, Copy, Debug)]
enum Backup {
    /// `pg_basebackup`: the files of the server, started without an archive.
    Files,
    /// `pg_basebackup`, restored with an archive.
    Archive,
    /// `pg_dump`, of the fence together with the tables that it protects.
    Dump,
}

/// Kills the server under load, and continues with a backup that was made under load. If `cured` is
/// true, also runs the steps that operators must take.
async fn restore(backup: Backup, cured: bool) -> Outcome {
    println!("{backup:?}, cured: {cured}");
    let mut lost = server().await;
    let address = Proxy::to(lost.addr()).await;
    let url = address.url(&lost.url("postgres"));
    outcome(&url, async |holders| {
        let copy = match backup {
            Backup::Files => Some(lost.copy(lost.addr(), &[]).await),
            Backup::Archive => {
                let mut copy = lost.copy(lost.addr(), &["--write-recovery-conf"]).await;
                copy.restore_from_archive();
                Some(copy)
            }
            Backup::Dump => {
                dump(&lost).await;
                None
            }
        };
        holders.go_on().await;
        address.set(Link::Cut);
        let restored = match copy {
            Some(copy) => {
                lost.crash().await;
                copy.start_on_a_free_port().await
            }
            None => {
                undump(&lost).await;
                lost
            }
        };
        if cured {
            let cure = fence(&restored).await.after_failover().await;
            cure.unwrap();
        }
        address.switch_to(restored.addr());
        restored
    })
    .await
}

async fn dump(server: &PostgresServer) {
    let mut command = server.program("pg_dump");
    command.args(["--format=custom", "--file=dump", "--dbname"]);
    run(command, server).await;
}

async fn undump(server: &PostgresServer) {
    let empty = "DROP SCHEMA public, tower_fence CASCADE; CREATE SCHEMA public";
    execute(server, empty).await;
    let mut command = server.program("pg_restore");
    command.args(["--exit-on-error", "dump", "--dbname"]);
    run(command, server).await;
}

/// Runs a program on the database of the server, while the holders continue.
async fn run(mut command: Command, server: &PostgresServer) {
    command.arg(server.url("postgres"));
    let ran = tokio::task::spawn_blocking(move || command.output());
    let ran = ran.await.unwrap().unwrap();
    assert!(ran.status.success(), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crashes_and_stops_under_load_lose_nothing() {
    let mut postgres = server().await;
    let url = postgres.url("postgres");
    let outcome = outcome(&url, async |holders| {
        for crashes in [true, false, true, true] {
            holders.go_on().await;
            match crashes {
                true => postgres.crash().await,
                false => postgres.stop().await,
            }
            postgres.restart().await;
        }
        postgres
    });
    assert_eq!(outcome.await, Outcome::default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backup_without_its_archive_repeats_lost_tokens() {
    for backup in [Backup::Files, Backup::Dump] {
        let outcome = restore(backup, false).await;
        assert!(outcome.has_lost_enough().repeated > 0, "{outcome:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_lost_by_a_restore_are_superseded() {
    for (backup, cured) in [
        (Backup::Files, true),
        (Backup::Dump, true),
        (Backup::Archive, false),
    ] {
        restore(backup, cured).await.has_lost_only_writes();
    }
}
