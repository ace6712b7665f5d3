//! Tokens of ZooKeeper, with its client kazoo.

use tower_fence::{
    Token,
    lease::{Acquire, Leases, MemoryLeases},
};

use super::{Inventory, refuses_the_paused_holder, write_to};
use crate::support::{
    lease::{LONG, sku},
    lock_servers::ZooKeeper,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_holder_of_a_lock_in_zookeeper_is_refused() {
    let zookeeper = ZooKeeper::start().await;
    refuses_the_paused_holder(
        |sku, url| zookeeper.holder_with(2, sku, url, 1.0),
        // The session ends after its timeout.
        async |_| {},
        |sku, url| zookeeper.holder(sku, url),
    )
    .await;
}

/// Each election begins an epoch. If the data is lost, the epochs are lost too, and all tokens are
/// refused until the fence is reset.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wiped_zookeeper_is_refused_until_a_reset() {
    let mut zookeeper = ZooKeeper::start().await;
    let inventory = Inventory::start().await;
    let url = inventory.url();
    let mut highest = 0;
    for epoch in 1..=2 {
        let (token, status) = zookeeper.holder("sku-1", &url).finish().await;
        assert!(token > highest && status == 200);
        assert_eq!(token >> 32, epoch);
        highest = token;
        zookeeper.kill();
        if epoch == 1 {
            zookeeper.start_again().await;
        }
    }

    zookeeper.forget();
    zookeeper.start_again().await;
    let (token, status) = zookeeper.holder("sku-1", &url).finish().await;
    assert!(token < highest && status == 412);
    let max_token = inventory.fence.inspect(&sku()).await;
    assert_eq!(max_token.unwrap(), Some(highest));

    // The required step is a reset to the token of the new holder, after all older holders have
    // ended.
    let granted = Token::new(token).unwrap();
    inventory.fence.reset(&sku(), granted).await.unwrap();
    let refused = inventory.write("sku-1", token).await;
    refused.is_problem(412, "stale-token");
    let (token, status) = zookeeper.holder("sku-1", &url).finish().await;
    assert!(token < highest && status == 200);
    // The layer admits tokens of older holders, so none of them may still be running.
    assert_eq!(inventory.write("sku-1", highest).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zxids_of_zookeeper_are_tokens_up_to_leader_epoch_232830() {
    let mut zookeeper = ZooKeeper::start().await;
    let inventory = Inventory::start().await;
    zookeeper.kill();
    zookeeper.set_epoch(232_829);
    for (epoch, status) in [(232_830, 200), (232_831, 400)] {
        zookeeper.start_again().await;
        let holder = zookeeper.holder("sku-1", &inventory.url());
        let (token, answered) = holder.finish().await;
        assert_eq!((token >> 32, answered), (epoch, status));
        let valid = Token::new(token).ok().map(Token::get);
        assert_eq!(valid, (status == 200).then_some(token));
        zookeeper.kill();
    }
}

/// The tokens of this crate's issuer begin below those of ZooKeeper.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn change_from_zookeeper_needs_a_step_without_announced_grants() {
    let zookeeper = ZooKeeper::start().await;
    let inventory = Inventory::start().await;
    let ours = inventory.accepting_only_its_own_tokens().await;
    let url = inventory.url();
    let (used, status) = zookeeper.holder("sku-1", &url).finish().await;
    assert_eq!(status, 200);
    // This is a later token, which the fence of sku-1 has not received.
    let (unseen, _) = zookeeper.holder("sku-9", &url).finish().await;
    let unannounced = || MemoryLeases::new(inventory.fence.clone());
    let request = || Acquire::new(LONG);

    let lease = unannounced().acquire(&sku(), request()).await.unwrap();
    assert!(lease.token.get() < used);
    let refused = write_to(&ours, "sku-1", lease.token.get()).await;
    refused.is_problem(412, "stale-token");

    let leases = unannounced().announced_to(inventory.fence.clone());
    let lease = leases.acquire(&sku(), request()).await.unwrap();
    let announced = lease.token.get();
    assert!(used < announced && announced < unseen);
    // A layer that accepts only tokens of this database refuses the holders of the other issuer,
    // whichever tokens the fence has received.
    let refused = write_to(&ours, "sku-1", used).await;
    assert!([403, 412].contains(&refused.status), "{refused:?}");
    let refused = write_to(&ours, "sku-1", unseen).await;
    refused.is_problem(403, "unknown-epoch");
    assert_eq!(write_to(&ours, "sku-1", announced).await.status, 200);
    // A layer that accepts every issuer admits these tokens.
    assert_eq!(inventory.write("sku-1", unseen).await.status, 200);

    // Without announcements, one step is needed before the first grant.
    let highest = Token::new(unseen).unwrap();
    inventory.fence.begin_epochs_above(highest).await.unwrap();
    let lease = unannounced().acquire(&sku(), request()).await.unwrap();
    let above = lease.token.get();
    assert!(above > unseen);
    assert_eq!(write_to(&ours, "sku-1", above).await.status, 200);
    for older in [used, unseen, announced] {
        let refused = write_to(&ours, "sku-1", older).await;
        refused.is_problem(412, "stale-token");
    }
}
