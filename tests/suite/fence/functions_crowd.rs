//! A crowd that writes to one resource: half of it through the crate, half through the functions in
//! Postgres, as a program in another language would.

use std::{
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::Duration,
};

use futures_util::future::join_all;
use sqlx::{Connection, PgConnection, Postgres};
use tokio::time::sleep;
use tower_fence::{AdmitError, TokenUse};

use crate::support::{
    database::{Fresh, TestDatabase},
    fence::{sku, token},
    functions::{admit, is_refused},
};

const WRITERS: usize = 8;
const WRITES: i64 = 150;
const STOCK: i64 = 1_000_000;

async fn read_think_write(conn: &mut PgConnection) {
    let n = Postgres::number(conn, "SELECT n FROM stock").await.unwrap();
    sleep(Duration::from_millis(2)).await;
    Postgres::execute(conn, &format!("UPDATE stock SET n = {}", n - 1))
        .await
        .unwrap();
}

/// Whether the stock falls by as many as were acknowledged. Half of the writers run `plain`: it says
/// whether its token was admitted.
async fn sums_agree(
    db: &Fresh<Postgres>,
    plain: impl AsyncFn(&mut PgConnection, i64) -> bool,
) -> bool {
    db.execute(&format!(
        "DELETE FROM stock; INSERT INTO stock VALUES ('sku-1', {STOCK})"
    ))
    .await;
    let first = db.fence().inspect(&sku()).await.unwrap().unwrap_or(0) + 1;
    let next = AtomicI64::new(first);
    let [through_fence, through_functions, refused] = [(); 3].map(|()| AtomicI64::new(0));
    let done = || through_fence.load(Relaxed) + through_functions.load(Relaxed) >= WRITES;
    let one = async |writer: usize| {
        let mut conn = PgConnection::connect(&db.url).await.unwrap();
        // Each of its own, as in several processes: clones would wait for each other outside of the
        // database.
        let fence = db.fence();
        while !done() {
            let value = next.fetch_add(1, Relaxed);
            // Some are late with their tokens.
            sleep(Duration::from_millis(rand::random_range(0..3))).await;
            let acknowledged = if writer.is_multiple_of(2) {
                match fence.begin(&sku(), token(value), TokenUse::SingleUse).await {
                    Ok(mut tx) => {
                        read_think_write(&mut tx).await;
                        tx.commit().await.unwrap();
                        Some(&through_fence)
                    }
                    Err(AdmitError::Stale(_)) => None,
                    Err(error) => panic!("{error:?}"),
                }
            } else {
                plain(&mut conn, value).await.then_some(&through_functions)
            };
            acknowledged.unwrap_or(&refused).fetch_add(1, Relaxed);
        }
    };
    join_all((0..WRITERS).map(one)).await;
    let left = db.number("SELECT n FROM stock").await;
    println!(
        "{through_fence:?} and {through_functions:?} acknowledged, {refused:?} refused, {left} left"
    );
    let acknowledged = [through_fence, through_functions].map(AtomicI64::into_inner);
    assert!(acknowledged.iter().all(|&one| one > 0), "{acknowledged:?}");
    STOCK - left == acknowledged.iter().sum::<i64>()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_crate_and_the_functions_exclude_each_other() {
    let db = Postgres::fresh(8).await;
    let agree = sums_agree(&db, async |conn, value| {
        let mut tx = conn.begin().await.unwrap();
        if let Err(refused) = admit(&mut tx, "sku-1", value).await {
            is_refused::<i64>(Err(refused), "TF412");
            tx.rollback().await.unwrap();
            return false;
        }
        read_think_write(&mut tx).await;
        tx.commit().await.unwrap();
        true
    });
    assert!(agree.await);
}

/// The same crowd finds those who commit the check before they write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_in_a_transaction_of_its_own_is_caught() {
    let db = Postgres::fresh(8).await;
    for _ in 0..3 {
        let agree = sums_agree(&db, async |conn, value| {
            if let Err(refused) = admit(conn, "sku-1", value).await {
                is_refused::<i64>(Err(refused), "TF412");
                return false;
            }
            read_think_write(conn).await;
            true
        });
        if !agree.await {
            return;
        }
    }
    panic!("the crowd did not find the broken check: it proves nothing");
}
