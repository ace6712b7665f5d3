//! The cleanup of a failed request on a quorum. It removes only what the request itself has sealed.

use tower_fence::lease::{Acquire, Leases};

use super::epochs::Site;
use crate::support::{
    epochs::Away,
    lease::{LONG, grant, is_unavailable, keeps_its_token, sku},
};

#[tokio::test]
async fn repetition_that_fails_spares_the_lease_of_the_first_request() {
    let site = Site::new().await;
    let leases = site.issuer().await;
    let held = grant(&leases, &sku(), LONG).await;
    let away = Away::of(&site.db);
    let other = site.issuer_with(away.clone()).await;
    // This issuer has cached the source of epochs, but no counter.
    grant(&other, &site.neighbour(), LONG).await;
    for node in &site.nodes[..2] {
        node.command(&["DEL", &site.counter()]).await;
    }
    away.set(true);
    let again = Acquire::new(LONG).lease_id(held.id.clone());
    is_unavailable(other.acquire(&sku(), again).await);
    for leases in [&leases, &other] {
        keeps_its_token(leases, &held).await;
    }
}
