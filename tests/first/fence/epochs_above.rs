//! `Fence::begin_epochs_above`: the first grant of each partition is above all tokens that another
//! lock server has granted.

use tower_fence::{
    Token,
    epochs::{Epoch, EpochError, Epochs},
};

use crate::support::database::{TestDatabase, on_both_databases};

on_both_databases!(
    epochs_of_every_partition_begin_above_a_token,
    without_a_higher_epoch_nothing_changes,
);

async fn epochs_of_every_partition_begin_above_a_token<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let next = async |partition| {
        let epoch = fence.next_epoch(partition, Epoch::FIRST).await;
        epoch.unwrap().get()
    };
    // Tokens below the first epoch, such as etcd's revisions, change nothing.
    let below = Token::new(999_999_999).unwrap();
    fence.begin_epochs_above(below).await.unwrap();
    assert_eq!(next(1).await, 1);
    fence.report_epoch(2, Epoch::new(9).unwrap()).await.unwrap();
    let highest = Token::new(0x1_0000_0004).unwrap();
    fence.begin_epochs_above(highest).await.unwrap();
    for (partition, epoch) in [(0, 5), (1, 5), (2, 10), (110, 5), (255, 5)] {
        assert_eq!(next(partition).await, epoch, "partition {partition}");
    }
    let first = Epoch::new(5).unwrap().token(1).unwrap();
    assert!(first > highest);
}

async fn without_a_higher_epoch_nothing_changes<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let exhausted = fence.begin_epochs_above(Token::MAX).await;
    assert_matches!(exhausted, Err(EpochError::Exhausted));
    assert_eq!(db.count("tower_fence.epochs").await, 0);
}
