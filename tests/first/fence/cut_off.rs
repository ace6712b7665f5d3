//! Connections to Postgres that are cut or abandoned at different moments of a transaction.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::try_join_all;
use sqlx::{Postgres, postgres::PgPoolOptions};
use tokio::sync::watch;
use tower_fence::{AdmitError, Fence, FenceBuilder, fence::CommitError};

use crate::support::{
    PATIENCE,
    database::{Fresh, TestDatabase},
    eventually,
    fence::{begin, insert, spawn_write, write},
    proxy::{Passage, Proxy, Sender},
};

/// Returns a fence with a pool of one connection, which goes through a proxy.
async fn fence(
    db: &Fresh<Postgres>,
    proxy: &Proxy,
    settings: FenceBuilder<Postgres>,
) -> Fence<Postgres> {
    let options = PgPoolOptions::new().max_connections(1);
    settings.build(db.pool_under_test(Some(proxy), options).await)
}

/// Returns the position after this text in a message.
fn behind(message: &[u8], text: &str) -> Option<usize> {
    let mut windows = message.windows(text.len());
    let place = windows.position(|window| window == text.as_bytes())?;
    Some(place + text.len())
}

/// Starts a proxy. Once `armed` is true, it cuts each connection right after the server's
/// confirmation of this command.
async fn cutting(db: &Fresh<Postgres>, command: &'static str, armed: &Arc<AtomicBool>) -> Proxy {
    let armed = Arc::clone(armed);
    Proxy::judging(db.addr(), move |sender, message| {
        match behind(message, command) {
            Some(end) if sender == Sender::Server && armed.load(SeqCst) => Passage::CutAfter(end),
            _ => Passage::Whole,
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_loss_after_a_confirmed_commit_is_a_success() {
    for reuses in [false, true] {
        let db = Postgres::fresh(2).await;
        let cuts = [
            (1, "RELEASE\0", false),
            (2, "COMMIT\0", true),
            // This is the confirmation of the BEGIN of the next transaction.
            (3, "BEGIN\0", true),
        ];
        for (value, confirmed, is_success) in cuts {
            let armed = Arc::default();
            let proxy = cutting(&db, confirmed, &armed).await;
            let fence = fence(&db, &proxy, Fence::builder().reuse_connections(reuses)).await;
            let mut tx = begin(&fence, value).await;
            insert(&mut tx, value).await;
            armed.store(true, SeqCst);
            let committed = tx.commit().await;
            let is_unknown = matches!(committed, Err(CommitError::OutcomeUnknown(_)));
            assert_eq!((committed.is_ok(), is_unknown), (is_success, !is_success));
        }
        eventually!("all entries are written", db.entries().await == 3);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_begin_leaves_no_transaction_on_the_connection() {
    let db = Postgres::fresh(2).await;
    let (sent, mut is_sent) = watch::channel(false);
    let (held, is_held) = watch::channel(true);
    let armed = Arc::<AtomicBool>::default();
    let proxy = {
        let (armed, sent) = (Arc::clone(&armed), Arc::new(sent));
        Proxy::judging(db.addr(), move |sender, message| {
            let is_begin = sender == Sender::Client && behind(message, "BEGIN").is_some();
            if is_begin && armed.load(SeqCst) {
                sent.send_replace(true);
            }
            Passage::Held(is_held.clone()).when(sender == Sender::Server && *sent.borrow())
        })
    };
    let proxy = proxy.await;
    let fence = fence(&db, &proxy, Fence::builder()).await;
    write(&fence, 1).await.unwrap();
    armed.store(true, SeqCst);
    let begun = spawn_write(&fence, 2);
    is_sent.wait_for(|sent| *sent).await.unwrap();
    eventually!(
        "the transaction has begun",
        db.sessions_under_test("state = 'idle in transaction'")
            .await
            == 1
    );
    begun.abort();
    assert!(begun.await.unwrap_err().is_cancelled());
    held.send_replace(false);
    eventually!(
        "the session is idle",
        db.sessions_under_test("state = 'idle'").await == 1
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_write_fails_after_the_host_of_the_database_was_replaced() {
    const CONNECTIONS: u32 = 4;
    let timeout = Duration::from_secs(1);
    for (reuses, tests) in [(false, true), (false, false), (true, true), (true, false)] {
        let db = Postgres::fresh(2).await;
        let is_gone = Arc::<AtomicBool>::default();
        let proxy = {
            let is_gone = Arc::clone(&is_gone);
            // Connections to the old host get no answer, not even a reset. New connections reach
            // the new host.
            Proxy::judging_each(db.addr(), move || {
                let (is_gone, is_new) = (Arc::clone(&is_gone), is_gone.load(SeqCst));
                move |_: Sender, _: &[u8]| Passage::Dropped.when(!is_new && is_gone.load(SeqCst))
            })
        };
        let proxy = proxy.await;
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .test_before_acquire(tests)
            .connect(&proxy.url(&db.url))
            .await;
        let fence = Fence::builder()
            .reuse_connections(reuses)
            // The pool tests a connection within this timeout.
            .pool_timeout(if tests { timeout } else { PATIENCE })
            .lock_timeout(timeout)
            .answer_timeout(timeout)
            .build(pool.unwrap());
        write(&fence, 1).await.unwrap();
        let all = (0..CONNECTIONS).map(|_| fence.pool().acquire());
        drop(try_join_all(all).await.unwrap());
        eventually!(
            "the connections are idle",
            fence.pool().num_idle() == CONNECTIONS as usize
        );
        is_gone.store(true, SeqCst);
        assert_matches!(write(&fence, 2).await, Err(AdmitError::Unavailable(_)));
        write(&fence, 3).await.unwrap();
    }
}
