//! A forged token that is far too high, and the reset by an operator.

use std::time::Duration;

use sqlx::Postgres;
use tower_fence::{
    AdmitError, Fence, Resource, Token, TokenUse,
    announce::{Announce, AnnounceError, LeaseDigest},
    epochs::{Epoch, Epochs},
    fence::{FenceDatabase, ResetError},
};

use crate::support::{
    database::{TestDatabase, on_both_databases, read},
    fence::{sku, token},
    functions::{acquire, release},
};

on_both_databases!(
    reset_lowers_the_fence_and_clears_the_cache,
    reset_never_lowers_a_fence_below_a_grant,
    two_leases_never_share_a_token_whatever_their_order,
);

const FORGED: i64 = 999_999_999_000_000;

async fn admits<DB: FenceDatabase>(fence: &Fence<DB>, value: i64) -> bool {
    match fence.begin(&sku(), token(value), TokenUse::Reusable).await {
        // The transaction is dropped, so nothing changes.
        Ok(_) => true,
        Err(AdmitError::Stale(_)) => false,
        Err(error) => panic!("{error:?}"),
    }
}

async fn reset_lowers_the_fence_and_clears_the_cache<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let epoch = fence.next_epoch(110, Epoch::FIRST).await.unwrap();
    let granted = epoch.token(5).unwrap().get();
    fence.raise(&sku(), token(FORGED)).await.unwrap();
    // The refusal is cached from here on.
    assert!(!admits(&fence, granted + 1).await);
    fence.reset(&sku(), token(granted)).await.unwrap();
    assert!(!admits(&fence, granted).await, "stale tokens stay stale");
    assert!(admits(&fence, granted + 1).await);
    assert_eq!(fence.inspect(&sku()).await.unwrap(), Some(granted));
    // A reset to an announced token ends the lease of that token.
    assert_eq!(announce(&fence, granted + 1, "a").await, None);
    fence.reset(&sku(), token(granted + 1)).await.unwrap();
    let again = announce(&fence, granted + 1, "a").await;
    assert_eq!(again, Some(granted + 2));
    // A resource without a row has nothing to reset.
    let other = Resource::new("never seen").unwrap();
    fence.reset(&other, token(FORGED)).await.unwrap();
    assert_eq!(fence.inspect(&other).await.unwrap(), None);
}

async fn reset_never_lowers_a_fence_below_a_grant<DB: TestDatabase>() {
    let db = DB::fresh(2).await;
    let fence = db.fence();
    let epoch = Epoch::new(3).unwrap();
    fence.report_epoch(110, epoch).await.unwrap();
    let announced = epoch.token(5).unwrap();
    assert_eq!(announce(&fence, announced.get(), "one").await, None);
    for below in [announced.get() - 1, 1] {
        let refused = fence.reset(&sku(), token(below)).await;
        assert_matches!(
            refused,
            Err(ResetError::BelowGranted { granted, .. }) if granted == announced.get()
        );
    }
    // If a grant was above a forged token, a reset below that grant is refused as well, because its
    // lease may still be held.
    fence.raise(&sku(), token(FORGED)).await.unwrap();
    assert_eq!(announce(&fence, FORGED, "one").await, None);
    let below = fence.reset(&sku(), announced).await;
    assert_matches!(below, Err(ResetError::BelowGranted { granted, .. }) if granted == FORGED);
    // The highest possible token is ignored here, because otherwise a reset would be impossible.
    // Only the assigned epochs limit the reset.
    assert_eq!(announce(&fence, Token::MAX.get(), "one").await, None);
    let below = fence.reset(&sku(), token(2_000_000_005)).await;
    assert_matches!(
        below,
        Err(ResetError::BelowGranted { granted, .. }) if granted == 3_000_000_000
    );
    fence.reset(&sku(), announced).await.unwrap();
    assert!(!admits(&fence, announced.get()).await);
    // The next grant is announced as usual.
    let next = epoch.token(6).unwrap();
    assert_eq!(announce(&fence, next.get(), "two").await, None);
    assert!(admits(&fence, next.get()).await);
    // The last announcement no longer belongs to this lease.
    assert_eq!(announce(&fence, Token::MAX.get(), "one").await, None);
    fence.reset(&sku(), next).await.unwrap();
    let lease = LeaseDigest::of("one");
    let again = fence.announce(&sku(), next, &lease, false).await;
    let is_last = matches!(again, Err(AnnounceError::Superseded { was_last: true, .. }));
    assert!(again.is_err() && !is_last, "{again:?}");
}

/// Announces a token. If the token is superseded, returns the token after the highest one.
async fn announce<DB: FenceDatabase>(fence: &Fence<DB>, value: i64, lease: &str) -> Option<i64> {
    let lease = LeaseDigest::of(lease);
    match fence.announce(&sku(), token(value), &lease, false).await {
        Ok(()) => None,
        Err(AnnounceError::Superseded { max_token, .. }) => Some(max_token + 1),
        Err(error) => panic!("{error:?}"),
    }
}

/// The resource has no row, and its floor is above the new token. Another transaction inserts the
/// row.
#[tokio::test]
async fn reset_does_not_undo_a_concurrent_announcement() {
    let db = Postgres::fresh(4).await;
    db.execute("UPDATE tower_fence.floors SET floor = 500 WHERE partition = 110")
        .await;
    let mut announcing = db.pool.begin().await.unwrap();
    let announce = "SELECT outcome FROM tower_fence.announce('sku-1', 900, 'lease', false)";
    let outcome: String = read(&mut *announcing, announce).await;
    assert_eq!(outcome, "announced");
    let fence = db.fence();
    let reset = tokio::spawn(async move { fence.reset(&sku(), token(100)).await });
    db.waits_for_lock().await;
    announcing.commit().await.unwrap();
    let reset = reset.await.unwrap();
    assert_matches!(reset, Err(ResetError::BelowGranted { granted: 900, .. }));
    assert_eq!(db.fence().inspect(&sku()).await.unwrap(), Some(899));
}

/// The removal of the row leaves only the floor, and leases in Postgres have no other token
/// counter.
#[tokio::test]
async fn reset_never_repeats_a_grant_whose_row_was_removed() {
    let db = Postgres::fresh(4).await;
    let fence = db.fence();
    let mut conn = db.pool.acquire().await.unwrap();
    let mut grant = async || {
        let lease = acquire(&mut conn, "sku-1", "60 s").await.unwrap();
        release(&mut conn, "sku-1", &lease.lease_id).await.unwrap();
        lease.token
    };
    grant().await;
    let last = grant().await;
    assert_eq!(fence.remove_idle(Duration::ZERO, 10).await.unwrap(), 1);
    for has_row in [false, true] {
        if has_row {
            fence.raise(&sku(), token(FORGED)).await.unwrap();
        }
        let below = fence.reset(&sku(), token(last - 1)).await;
        assert_matches!(
            below,
            Err(ResetError::BelowGranted { granted, .. }) if granted == last
        );
        fence.reset(&sku(), token(last)).await.unwrap();
    }
    assert_eq!(grant().await, last + 1);
}

/// Repeatedly announces two grants with the same token at the same time.
async fn two_leases_never_share_a_token_whatever_their_order<DB: TestDatabase>() {
    let db = DB::fresh(4).await;
    let (one, two) = (db.fence(), db.fence());
    for value in 1..=20 {
        let both = tokio::join!(announce(&one, value, "a"), announce(&two, value, "b"));
        assert!(
            matches!(both, (None, Some(_)) | (Some(_), None)),
            "token {value}: {both:?}"
        );
    }
}
