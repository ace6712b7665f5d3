//! The database of a fence: its tables, epochs and settings, and an unreachable database.

use std::time::Duration;

use sqlx::{Postgres, Sqlite, postgres::PgPoolOptions};
use tokio::time::sleep;
use tower_fence::{
    AdmitError, Fence,
    epochs::{Epoch, Epochs},
};

use crate::support::{
    database::{TestDatabase, on_both_databases},
    fence::{begin, sku, spawn_write, token, use_up, write},
    ports::free_port,
};

on_both_databases!(
    epochs_increase_for_every_caller,
    migrating_twice_changes_nothing,
);

async fn epochs_increase_for_every_caller<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let (one, two) = (db.fence(), db.fence());
    assert_eq!(one.next_epoch(7, Epoch::FIRST).await.unwrap(), Epoch::FIRST);
    assert_eq!(two.next_epoch(7, Epoch::FIRST).await.unwrap().get(), 2);
    let far = Epoch::new(40).unwrap();
    assert_eq!(one.next_epoch(7, far).await.unwrap(), far);
    assert_eq!(one.next_epoch(7, far).await.unwrap().get(), 41);
    assert_eq!(one.next_epoch(8, Epoch::FIRST).await.unwrap(), Epoch::FIRST);

    let asking = (0..20).map(|_| one.next_epoch(9, Epoch::FIRST));
    let epochs = futures_util::future::try_join_all(asking).await.unwrap();
    let mut epochs: Vec<_> = epochs.into_iter().map(Epoch::get).collect();
    epochs.sort_unstable();
    assert_eq!(epochs, (1..=20).collect::<Vec<_>>());

    let last = Epoch::new(999_999).unwrap();
    one.next_epoch(1, last).await.unwrap();
    one.next_epoch(1, Epoch::FIRST).await.unwrap_err();
}

async fn migrating_twice_changes_nothing<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let before = db.count("tower_fence.migrations").await;
    write(&fence, 5).await.unwrap();
    fence.migrate().await.unwrap();
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(5));
    assert_eq!(db.count("tower_fence.migrations").await, before);
}

#[tokio::test]
async fn unreachable_database_is_reported_as_unavailable() {
    let address = format!("127.0.0.1:{}", free_port());
    let url = format!("postgres://nobody:sesame@{address}/none");
    let pool = PgPoolOptions::new().connect_lazy(&url).unwrap();
    let fence = Fence::builder()
        .pool_timeout(Duration::from_millis(200))
        .build(pool);
    let refused = use_up(&fence, &sku(), token(1)).await.unwrap_err();
    assert_matches!(refused, AdmitError::Unavailable(_));
    let text = format!("{refused:?}");
    assert_contains!(text, &address);
    assert!(!text.contains("sesame"), "no password in an error");
}

#[tokio::test]
async fn failed_connect_names_the_address_and_the_cause() {
    let address = format!("127.0.0.1:{}", free_port());
    let url = format!("postgres://nobody:sesame@{address}/none");
    let pool = PgPoolOptions::new().acquire_timeout(Duration::from_millis(200));
    let connected = Fence::<Postgres>::builder().connect_with(pool, url.parse().unwrap());
    let text = connected.await.unwrap_err().to_string();
    assert!(
        text.contains(&address) && text.contains("refused"),
        "{text}"
    );
    assert!(!text.contains("sesame"), "no password in an error");
}

#[tokio::test]
async fn connect_refuses_the_url_of_another_database() {
    let db = Postgres::fresh(1).await;
    let url = db.url.replacen("postgres", "mysql", 1);
    let refused = Fence::<Postgres>::connect(&url).await.unwrap_err();
    let text = refused.to_string();
    assert_contains!(text, "must begin with postgres: or postgresql:");
    let refused = Fence::<Sqlite>::connect(&db.url).await;
    assert_matches!(refused, Err(sqlx::Error::Configuration(_)));
}

#[tokio::test]
async fn pool_of_a_database_in_memory_has_one_connection() {
    for url in ["sqlite::memory:", "sqlite:shop?mode=memory"] {
        let fence = Fence::<Sqlite>::connect(url).await.unwrap();
        assert_eq!(fence.pool().options().get_max_connections(), 1, "{url}");
    }
}

#[tokio::test]
async fn a_stricter_default_isolation_level_does_not_matter() {
    let db = Postgres::fresh(4).await;
    let name = db.url.rsplit('/').next().unwrap().to_owned();
    let strict =
        format!("ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'");
    db.execute(&strict).await;
    let pool = PgPoolOptions::new().connect(&db.url).await.unwrap();
    let fence = Fence::new(pool);
    let first = begin(&fence, 5).await;
    let waiting = spawn_write(&fence, 6);
    sleep(Duration::from_millis(50)).await;
    first.commit().await.unwrap();
    waiting.await.unwrap().unwrap();
}
