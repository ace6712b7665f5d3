//! A holder in a process of its own, paused past its lease in etcd.

use std::{env, process::Command, time::Duration};

use sqlx::{Sqlite, SqlitePool};
use tower_fence::{AdmitError, Fence, TokenUse, client::Holder, lease::EtcdLeases};

use crate::support::{
    database::TestDatabase,
    etcd::EtcdCluster,
    lease::{LONG, next_grant, sku},
    process::Process,
};

const HOLDER: &str = "lease::etcd_process::the_holder";

/// Holds a lease until it is lost, and writes all the same.
#[tokio::test]
#[ignore = "the process that the other test pauses"]
async fn the_holder() {
    let database = env::var("HOLDER_DATABASE_URL").unwrap();
    let fence = Fence::new(SqlitePool::connect(&database).await.unwrap());
    let urls = [env::var("HOLDER_ETCD_URL").unwrap()];
    let leases = EtcdLeases::connect(&urls, fence.clone()).await.unwrap();
    let holder = Holder::new(leases).ttl(Duration::from_secs(1));
    let lease = holder.acquire("sku-1").await.unwrap();
    let write = async || {
        let begun = fence.begin(&sku(), lease.token(), TokenUse::Reusable).await;
        match begun {
            Ok(tx) => {
                tx.commit().await.unwrap();
                "written".into()
            }
            Err(AdmitError::Stale(stale)) => format!("stale: {}", stale.presented_token),
            Err(other) => format!("{other:?}"),
        }
    };
    println!("{} {}", lease.token(), write().await);
    let loss = lease.lost().await;
    println!("lost: {loss}");
    println!("{}", write().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_is_paused_past_its_lease_is_told_and_its_write_is_refused() {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let near = EtcdLeases::connect(&cluster.urls(), db.fence())
        .await
        .unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args([HOLDER, "--exact", "--ignored", "--nocapture"])
        .env("HOLDER_ETCD_URL", &cluster.urls()[0])
        .env("HOLDER_DATABASE_URL", &db.url);
    let mut holder = Process::run(command);
    holder.prints(" written\n", 1).await;
    holder.signal("-STOP");
    let lease = next_grant(&near, LONG).await;
    let tx = db.fence();
    let tx = tx.begin(&sku(), lease.token, TokenUse::Reusable).await;
    tx.unwrap().commit().await.unwrap();
    holder.signal("-CONT");
    holder.prints("lost: ", 1).await;
    holder.prints("stale: ", 1).await;
    assert!(holder.exit().await.success());
    let told = holder.stdout();
    assert_eq!(told.matches("written").count(), 1, "{told}");
}
